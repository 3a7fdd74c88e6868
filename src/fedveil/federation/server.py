"""The server's side: what it holds between rounds, and how it takes in what clients send."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch

from fedveil.clients.engine import Tensors
from fedveil.clients.sgd import at_rest
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.plan import Plan
from fedveil.federation.steps import Prepared
from fedveil.streams import Streams
from fedveil.tree import RunningMean, Tree, per_client


@dataclass
class Server:
    """What the server holds."""

    params: Tensors
    buffers: Tensors
    velocity: Tensors  # of the server's momentum, under FedSGD

    @classmethod
    def start(cls, prepared: Prepared) -> Self:
        """The model as the task gives it."""
        model, device, settings = prepared.plan.task.model, prepared.device, prepared.plan.settings
        params = {n: p.detach().clone().to(device) for n, p in model.named_parameters() if p.requires_grad}
        buffers = {n: b.detach().clone().to(device) for n, b in model.named_buffers()}
        return cls(params, buffers, at_rest(params, settings.momentum if settings.protocol == "fedsgd" else 0.0))


class Collector:
    """Takes in the clients' messages, in client order and a few at a time, and gives their mean.

    Buffers that stay with their clients are kept in the clients' memory: a simulation has them at hand.
    """

    def __init__(self, plan: Plan, server: Server, memory: ClientMemory, number: int, step: int | None = None) -> None:
        """For the messages of a whole round, or of one of its steps."""
        self._plan, self._server, self._memory = plan, server, memory
        self._chain = plan.chain_at(number)
        self._path = ("round", number) if step is None else ("round", number, "step", step)
        self._mean = RunningMean()
        self._buffers = RunningMean()
        self._kept: list[Tree] = []
        self._clients: list[int] = []
        self.taken = 0  # clients whose messages were taken

    def add(self, clients: list[int], update: Tree, buffers: Tree, refused: Collection[int] = ()) -> None:
        """A few clients' messages; those of refused clients are left out of the means.

        A trusted server (a server defense) needs all updates at once: they are kept. To it a refused client has sent
        no change. Were it left out there, the number that the sum is divided by would tell of that client's data,
        which the guarantee does not allow for.
        """
        rows = [row for row, client in enumerate(clients) if client not in refused]
        if self._chain.aggregates:
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
        if not self._chain.aggregates:
            self._mean.add(update, weights)
        if self._plan.task.buffers == "shared":
            self._buffers.add(buffers, weights)
        elif self._plan.task.buffers == "local":
            self._memory.buffers |= {client: buffers.row(k) for k, client in enumerate(clients)}

    def mean(self) -> Tensors | None:
        """The mean update, after what a trusted server does to the updates; shared buffers move too.

        None where no update was taken.
        """
        if self._plan.task.buffers == "shared" and self.taken:
            self._server.buffers = self._buffers.result()
        if not self._kept:
            return self._mean.result() if self.taken else None
        weights = self._plan.weights(self._clients)
        streams = Streams.seeded(self._plan.seed, self._clients, *self._path, "server")
        updates = Tree.concat(self._kept)
        if self._plan.settings.message != "weights":
            return self._chain.aggregate(updates, weights, streams).mean(weights)
        # The changes are what a server can bound and noise: it knows the weights it sent, and takes them off.
        start = self._server.params
        mean = self._chain.aggregate(updates - Tree.expand(start, updates.count), weights, streams).mean(weights)
        return {name: start[name] + change for name, change in mean.items()}
