"""The apps of Flower's side of the FedAvg benchmark. Actors import this module, and each reads the workload once."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from torch.nn import functional


@cache
def workload() -> dict[str, Any]:
    torch.set_num_threads(1)
    work: dict[str, Any] = torch.load(os.environ["FLOWER_WORKLOAD"], weights_only=False)
    return work


class Client(NumPyClient):
    """One that trains the model it is sent for a local epoch."""

    def __init__(self, number: int) -> None:
        self.own = workload()["clients"][number]

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        work = workload()
        model, inputs, targets = work["model"], work["inputs"], work["targets"]
        with torch.no_grad():
            for p, array in zip(model.parameters(), parameters, strict=True):
                p.copy_(torch.from_numpy(array))
        optimizer = torch.optim.SGD(model.parameters(), lr=work["lr"])
        for batch in torch.split(self.own[torch.randperm(len(self.own))], work["batch_size"]):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        return [p.detach().numpy() for p in model.parameters()], len(self.own), {}


class Strict(FedAvg):
    """FedAvg that does not go on without a client: a benchmark must not get faster by failing."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        if failures:
            raise RuntimeError(f"a client failed: {failures[0]}")
        return super().aggregate_fit(server_round, results, failures)


def client(context: Context) -> Any:
    return Client(int(context.node_config["partition-id"])).to_client()


def server(context: Context) -> ServerAppComponents:
    work = workload()
    strategy = Strict(
        fraction_fit=work["per_round"] / len(work["clients"]),
        fraction_evaluate=0.0,
        min_available_clients=len(work["clients"]),
        initial_parameters=ndarrays_to_parameters([p.detach().numpy() for p in work["model"].parameters()]),
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=work["rounds"]))


client_app = ClientApp(client_fn=client)
server_app = ServerApp(server_fn=server)
