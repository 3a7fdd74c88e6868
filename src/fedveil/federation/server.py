"""The server's side: what it holds between rounds, and how buffers travel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.clients.sgd import at_rest
from fedveil.defenses.chain import ClientStates
from fedveil.federation.steps import Plan
from fedveil.streams import Streams
from fedveil.tree import RunningMean, Tree, per_client


@dataclass
class Server:
    """All that moves during a run. The clients' memories are here because one process plays them all."""

    params: Tensors
    buffers: Tensors
    velocity: Tensors  # of the server's momentum, under FedSGD
    local: dict[int, Tensors] = field(default_factory=dict)  # buffers that never leave their client
    states: ClientStates = field(default_factory=ClientStates)
    # Weights and buffers of clients that are to be judged in this round.
    trained: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)

    @classmethod
    def start(cls, plan: Plan) -> Self:
        """The model as the task gives it."""
        model, device = plan.task.model, plan.device
        params = {n: p.detach().clone().to(device) for n, p in model.named_parameters() if p.requires_grad}
        buffers = {n: b.detach().clone().to(device) for n, b in model.named_buffers()}
        momentum = plan.settings.momentum if plan.settings.protocol == "fedsgd" else 0.0
        return cls(params, buffers, at_rest(params, momentum))

    def buffers_of(self, plan: Plan, clients: Sequence[int]) -> Tree:
        """The buffers that these clients start from."""
        if plan.task.buffers == "local":
            return Tree.stack([self.local.get(client, self.buffers) for client in clients])
        return Tree.expand(self.buffers, len(clients))

    def mean_local_buffers(self) -> Tensors:
        """The mean of the clients' own buffers. Used to evaluate a simulation only: nobody sends them."""
        if not self.local:
            return self.buffers
        return Tree.stack([self.local[client] for client in sorted(self.local)]).mean()


class Collector:
    """Takes in the clients' messages, in client order and a few at a time, and gives their mean."""

    def __init__(self, plan: Plan, server: Server, *path: int | str) -> None:
        self._plan = plan
        self._server = server
        self._path = path
        self._mean = RunningMean()
        self._buffers = RunningMean()
        self._kept: list[Tree] = []
        self._clients: list[int] = []
        self.taken = 0  # clients whose messages were taken

    def add(
        self, clients: list[int], update: Tree, buffers: Tree, *, trusted: bool, refused: Collection[int] = ()
    ) -> None:
        """A few clients' messages; those of refused clients are left out of the means.

        A trusted server (a server defense) needs all updates at once: they are kept. To it a refused client has sent
        no change. Were it left out there, the number that the sum is divided by would tell of that client's data,
        which the guarantee does not allow for.
        """
        rows = [row for row, client in enumerate(clients) if client not in refused]
        if trusted:
            nothing = Tree.expand(self._server.params, len(clients))
            if self._plan.settings.message != "weights":
                nothing = nothing.map(torch.zeros_like)
            taken = torch.tensor([client not in refused for client in clients])
            self._kept.append(
                update
                if len(rows) == len(clients)
                else update.combine(nothing, lambda u, n: torch.where(per_client(taken.to(u.device), u), u, n))
            )
            self._clients += clients
        if len(rows) < len(clients):
            clients, update, buffers = [clients[row] for row in rows], update.rows(rows), buffers.rows(rows)
        if not clients:
            return
        self.taken += len(clients)
        weights = self._plan.weights(clients)
        if not trusted:
            self._mean.add(update, weights)
        if self._plan.task.buffers == "shared":
            self._buffers.add(buffers, weights)
        elif self._plan.task.buffers == "local":
            for k, client in enumerate(clients):
                self._server.local[client] = buffers.row(k)

    def mean(self, number: int) -> Tensors | None:
        """The mean update, after what a trusted server does to the updates; shared buffers move too.

        None where no update was taken.
        """
        if self._plan.task.buffers == "shared" and self.taken:
            self._server.buffers = self._buffers.result()
        if not self._kept:
            return self._mean.result() if self.taken else None
        weights: Tensor = self._plan.weights(self._clients)
        streams = Streams.seeded(self._plan.seed, self._clients, *self._path, "server")
        chain, updates = self._plan.chain_at(number), Tree.concat(self._kept)
        if self._plan.settings.message != "weights":
            return chain.aggregate(updates, weights, streams).mean(weights)
        # The changes are what a server can bound and noise: it knows the weights it sent, and takes them off.
        start = self._server.params
        mean = chain.aggregate(updates - Tree.expand(start, updates.count), weights, streams).mean(weights)
        return {name: start[name] + change for name, change in mean.items()}
