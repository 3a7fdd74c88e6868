"""pfl's side of the FedAvg benchmark, as pfl's own image benchmark sets it up. Runs in pfl's own environment.

`python pfl_side.py WORKLOAD` reads what `benchmarks/fedavg.py` wrote and prints one line of JSON. pfl spreads a run
over processes when PFL_WORKER_ADDRESSES and PFL_WORKER_RANK tell it to.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """The model with the two methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
        right = (self.network(inputs).argmax(1) == targets).sum().item()
        return {"accuracy": Weighted(right, len(targets))}


def main(path: str) -> None:
    work = torch.load(path, weights_only=False)
    torch.manual_seed(0)
    np.random.seed(0)
    clients = {str(k): (work["inputs"][own], work["targets"][own]) for k, own in enumerate(work["clients"])}
    module = Classifier(work["model"])
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(
        lambda client: PyTorchTensorDataset(clients[client], user_id=client),
        get_user_sampler("minimize_reuse", list(clients)),
    )
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()])
    params = NNAlgorithmParams(
        central_num_iterations=work["rounds"],
        evaluation_frequency=work["rounds"],  # the clients' own training metrics: in the first round alone
        train_cohort_size=work["per_round"],
        val_cohort_size=None,
    )
    training = NNTrainHyperParams(
        local_learning_rate=work["lr"], local_num_epochs=1, local_batch_size=work["batch_size"]
    )
    start = time.perf_counter()
    FederatedAveraging().run(params, backend, model, training, send_metrics_to_platform=False)
    seconds = time.perf_counter() - start
    if os.environ.get("PFL_WORKER_RANK", "0") == "0":
        with torch.no_grad():
            right = work["model"](work["test_inputs"]).argmax(1) == work["test_targets"]
        print(json.dumps({"seconds": seconds, "accuracy": right.double().mean().item()}))


if __name__ == "__main__":
    main(sys.argv[1])
