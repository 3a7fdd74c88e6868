"""Who learns it: FedSGD and FedAvg rounds, runs with checkpoints, captured updates, and probes of one model."""
