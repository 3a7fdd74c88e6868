"""FedSGD and FedAvg in plain torch: modules, optimizers and for-loops, one client after another.

Only the random choices (who takes part, in which order data are visited) are fedveil's.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedveil.federation.schedule import epoch_orders, sampled_clients
from fedveil.federation.settings import FederationSettings
from fedveil.tasks.task import Task

Tensors = dict[str, Tensor]


def reference(task: Task, settings: FederationSettings, seed: int = 0) -> tuple[Tensors, Tensors]:
    """The weights and buffers after all rounds."""
    server = copy.deepcopy(task.model).train()
    steps = fedsgd if settings.protocol == "fedsgd" else fedavg
    optimizer = _optimizer(server, settings, settings.lr)
    for number in range(1, settings.rounds + 1):
        optimizer.param_groups[0]["lr"] = settings.lr_at(number)
        clients = sampled_clients(seed, len(task.clients), settings.sampling_rate, number)
        steps(task, settings, seed, server, optimizer, number, clients)
    return {n: p.detach() for n, p in server.named_parameters()}, dict(server.named_buffers())


def fedsgd(
    task: Task,
    settings: FederationSettings,
    seed: int,
    server: nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    clients: list[int],
) -> None:
    loaders = {client: _batches(task, settings, seed, client, number) for client in clients}
    for step in range(max(map(len, loaders.values()))):
        gradients, buffers, weights = [], [], []
        for client, loader in loaders.items():
            if step >= len(loader):
                continue
            local = copy.deepcopy(server)
            local.zero_grad()
            inputs, targets = loader[step]
            task.loss(local(inputs), targets).backward()
            gradients.append([p.grad for p in local.parameters()])
            buffers.append(list(local.buffers()))
            weights.append(_weight(task, settings, client))
        optimizer.zero_grad()
        for parameter, *given in zip(server.parameters(), *gradients, strict=True):
            parameter.grad = _mean(given, weights)
        optimizer.step()
        _set_buffers(server, buffers, weights)


def fedavg(
    task: Task,
    settings: FederationSettings,
    seed: int,
    server: nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
    clients: list[int],
) -> None:
    uploads, buffers, weights = [], [], []
    for client in clients:
        local = copy.deepcopy(server)
        own = _optimizer(local, settings, settings.lr_at(number))
        for inputs, targets in _batches(task, settings, seed, client, number):
            own.zero_grad()
            task.loss(local(inputs), targets).backward()
            own.step()
        uploads.append([p.detach() for p in local.parameters()])
        buffers.append(list(local.buffers()))
        weights.append(_weight(task, settings, client))
    for parameter, *given in zip(server.parameters(), *uploads, strict=True):
        parameter.data.copy_(_mean(given, weights))
    _set_buffers(server, buffers, weights)


def _optimizer(model: nn.Module, settings: FederationSettings, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def _batches(
    task: Task, settings: FederationSettings, seed: int, client: int, number: int
) -> list[tuple[Tensor, Tensor]]:
    own = task.clients[client]
    found = []
    for order in epoch_orders(seed, client, number, len(own), settings.local_epochs):
        for start in range(0, len(own), settings.batch_size):
            found.append(task.train.batch(own[order[start : start + settings.batch_size]]))
    return found  # type: ignore[return-value]


def _weight(task: Task, settings: FederationSettings, client: int) -> float:
    return float(len(task.clients[client])) if settings.weighting == "size" else 1.0


def _mean(tensors: list[Tensor], weights: list[float]) -> Tensor:
    total = sum(weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True)) / sum(weights)
    return total.to(tensors[0].dtype) if tensors[0].is_floating_point() else total.round().to(tensors[0].dtype)


def _set_buffers(server: nn.Module, buffers: list[list[Tensor]], weights: list[float]) -> None:
    for buffer, *given in zip(server.buffers(), *buffers, strict=True):
        buffer.copy_(_mean(given, weights))
