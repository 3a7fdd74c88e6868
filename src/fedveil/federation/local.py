"""A client's local round under FedAvg: epochs of SGD, then the protected upload."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.clients.sgd import at_rest, sgd_step
from fedveil.defenses.chain import ClientStates
from fedveil.federation.capture import Truth
from fedveil.federation.plan import Moment, Walks
from fedveil.federation.steps import (
    Group,
    Prepared,
    RoundTally,
    Step,
    equal_groups,
    group_step,
    in_order,
    join,
    keep_memory,
    own_row,
    put_rows,
    refusals,
)
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs, take
from fedveil.tree import Tree


@dataclass(frozen=True, eq=False)
class Chunk:
    """A few clients with all that their local round starts from."""

    clients: list[int]
    number: int  # of the round
    start: Tensors  # the server's weights
    buffers: Tree
    states: ClientStates  # what their defenses remember
    keep: frozenset[int] = frozenset()  # clients whose data are kept beside their upload
    judge: frozenset[int] = frozenset()  # clients whose weights are kept as they are before the upload is protected


@dataclass
class LocalData:
    """The data behind one client's upload, step by step."""

    inputs: list[Inputs] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    seen: list[Inputs] = field(default_factory=list)

    def add(self, step: Step, row: int) -> None:
        """Add a client's row of a step."""
        self.inputs.append(take(step.inputs, row))
        self.targets.append(step.targets[row])
        self.seen.append(take(step.result.seen, row))

    def truth(self, steps: int | None = None) -> Truth:
        """All steps, or the first ones, one behind another."""
        inputs, seen = join(self.inputs[:steps], torch.cat), join(self.seen[:steps], torch.cat)
        return Truth(inputs, torch.cat(self.targets[:steps]), seen)


@dataclass(frozen=True, eq=False)
class Trained:
    """What a chunk of clients has after its local round, and what it remembers from it."""

    clients: list[int]
    upload: Tree  # weights or their change, protected
    buffers: Tree
    data: dict[int, LocalData]  # of the clients whose data are kept
    tally: RoundTally
    states: ClientStates


def train_chunk(prepared: Prepared, chunk: Chunk) -> Trained:
    """The local round of a few clients. It depends on nothing but its arguments, and may run in any process."""
    plan = prepared.plan
    return local_round(prepared, chunk, plan.walks(chunk.number, chunk.clients), plan.task.train)


def local_round(prepared: Prepared, chunk: Chunk, walks: Walks, examples: Examples) -> Trained:
    """Local training of a chunk of clients on these batches of the examples, and the protected upload."""
    clients, plan = _LocalClients(prepared, chunk, examples), prepared.plan
    for step in range(max(len(walk) for walk in walks.values())):
        clients.step({client: walk[step] for client, walk in walks.items() if step < len(walk)}, step)
        for observer in prepared.observers:
            observer.on_step(chunk.number, step)
    sent = clients.params
    if plan.settings.upload == "delta":
        sent = sent - Tree.expand(chunk.start, len(chunk.clients))
    upload = clients.protected(sent)
    clients.tally.trained = {
        client: (own_row(clients.params, row), own_row(clients.buffers, row))
        for row, client in enumerate(chunk.clients)
        if client in chunk.judge and client not in clients.tally.refused
    }
    return Trained(chunk.clients, upload, clients.buffers, clients.data, clients.tally, chunk.states)


class _LocalClients:
    """A chunk of clients on its way through a local round."""

    def __init__(self, prepared: Prepared, chunk: Chunk, examples: Examples) -> None:
        self._prepared, self._chunk, self._examples = prepared, chunk, examples
        # Copies from the start: every client's weights go their own way at once, and a compiled graph sees one layout.
        self.params = Tree.expand(chunk.start, len(chunk.clients)).map(torch.clone)
        self.buffers = chunk.buffers
        self._velocity = Tree(at_rest(self.params, prepared.plan.settings.momentum))
        self.data = {client: LocalData() for client in chunk.clients if client in chunk.keep}
        self.tally = RoundTally(chunk.number, chunk.clients)
        self._last: dict[int, Tensor] = {}  # each client's last batch that was not empty

    def step(self, batches: dict[int, Tensor], step: int) -> None:
        """One step of the clients that have another batch and were not refused."""
        plan, moment = self._prepared.plan, Moment(self._chunk.number, step)
        walking = [client for client in batches if client not in self.tally.refused]
        indices = {client: plan.compose(client, batches[client], moment) for client in walking}
        random_sizes = plan.chain_at(moment.round).random_sizes
        active = [client for client in walking if len(indices[client]) or random_sizes]
        self._last.update({client: indices[client] for client in active if len(indices[client])})
        for _, members in equal_groups(active, indices, self._chunk.states):
            planned = [plan.planned(batches[client], moment.round) for client in members]
            group = self._group(members, [indices[client] for client in members], planned)
            done = group_step(self._prepared, self._chunk.states, group, moment)
            self._move(group, done)
            self.tally.note_loss(done)
            self.tally.note_refused(done.refused)
            for row, client in enumerate(members):
                if client in self.data:
                    self.data[client].add(done, row)

    def _group(self, members: list[int], indices: list[Tensor], planned: list[int] | None = None) -> Group:
        params, buffers = self.params, self.buffers
        if len(members) < len(self._chunk.clients):
            rows = self._rows(members)
            params, buffers = params.rows(rows), buffers.rows(rows)
        return Group(members, params, buffers, self._prepared.read(self._examples, indices), planned)

    def _rows(self, members: list[int]) -> list[int]:
        return [self._chunk.clients.index(client) for client in members]

    def _move(self, group: Group, done: Step) -> None:
        settings, rows = self._prepared.plan.settings, self._rows(group.clients)
        moved, faster = sgd_step(
            group.params,
            done.result.update,
            self._velocity.rows(rows),
            lr=settings.lr_at(self._chunk.number),
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.params, self._velocity = put_rows(self.params, rows, moved), put_rows(self._velocity, rows, faster)
        self.buffers = put_rows(self.buffers, rows, done.result.buffers)

    def protected(self, sent: Tree) -> Tree:
        """The upload after its defenses. They see each client's last batch, as `Guard.upload` shows it to them.

        Clients that were refused on the way send nothing: their rows stay as they are.
        """
        plan, states, moment = self._prepared.plan, self._chunk.states, Moment(self._chunk.number, "upload")
        chain = plan.chain_at(moment.round)
        clients = [client for client in self._chunk.clients if client not in self.tally.refused]
        if not clients:
            return sent
        rows = self._rows(clients)
        update = sent.rows(rows)
        if any(defense.acts_at == "upload" for defense in chain.defenses):
            # A client whose sampling defense left every batch empty has no last batch: it shows its first example.
            first = {client: plan.task.clients[client % len(plan.task.clients)][:1] for client in clients}
            shown = {client: self._last.get(client, first[client]) for client in clients}
            positions, parts = [], []
            for where, members in equal_groups(clients, shown, states):
                batch = self._prepared.batch(self._group(members, [shown[client] for client in members]), moment)
                memory = states.gather(members, chain)
                parts.append(chain.upload(update.rows(where), batch, memory))
                refused = refusals(members, parts[-1], self.params, str(moment))
                keep_memory(states, members, memory, refused)
                self.tally.note_refused(refused)
                positions.append(where)
            update = in_order(positions, parts)
        else:
            self.tally.note_refused(refusals(clients, update, self.params, str(moment)))
        return put_rows(sent, rows, update)
