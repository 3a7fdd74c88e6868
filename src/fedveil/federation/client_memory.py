"""What clients keep for themselves between steps and rounds. None of it is the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedveil.clients.engine import Tensors
from fedveil.defenses.chain import ClientStates
from fedveil.tree import Tree


@dataclass
class ClientMemory:
    """The memories of all clients, in one place because one process plays them all."""

    states: ClientStates = field(default_factory=ClientStates)  # of their defenses
    buffers: dict[int, Tensors] = field(default_factory=dict)  # that never leave their client

    def buffers_of(self, clients: Sequence[int], sent: Tensors) -> Tree:
        """The buffers that these clients start from: their own, or else those that the server sent."""
        if not any(client in self.buffers for client in clients):
            return Tree.expand(sent, len(clients))
        return Tree.stack([self.buffers.get(client, sent) for client in clients])

    def statistics(self, sent: Tensors) -> Tensors:
        """The buffers that the server's model is evaluated with.

        Buffers that never leave their clients nobody sends: a simulation takes their mean, for this purpose only.
        """
        if not self.buffers:
            return sent
        return Tree.stack([self.buffers[client] for client in sorted(self.buffers)]).mean()
