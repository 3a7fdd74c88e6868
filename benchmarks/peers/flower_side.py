"""Flower's side of the FedAvg benchmark: its simulation with two actors. Runs in Flower's own environment.

`python flower_side.py WORKLOAD` reads what `benchmarks/fedavg.py` wrote.
"""

from __future__ import annotations

import os
import sys

from flwr.simulation import run_simulation

if __name__ == "__main__":
    os.environ["FLOWER_WORKLOAD"] = sys.argv[1]
    # Actors import the apps by name.
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    from flower_app import client_app, server_app, workload

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=len(workload()["clients"]),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )
