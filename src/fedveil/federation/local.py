"""A client's local round under FedAvg: epochs of SGD, then the protected upload."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.clients.sgd import at_rest, sgd_step
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.federation.capture import Truth
from fedveil.federation.schedule import batches, epoch_orders
from fedveil.federation.steps import (
    Outcome,
    Plan,
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
    states: ClientStates  # what they remember
    keep: frozenset[int] = frozenset()  # clients whose data are kept beside their upload
    judge: frozenset[int] = frozenset()  # clients whose weights are kept as they are before the upload is protected


@dataclass(frozen=True, eq=False)
class Trained:
    """What a chunk of clients has after its local round, and what it remembers from it."""

    local: Local
    outcome: Outcome
    states: ClientStates


def train_chunk(plan: Plan, chunk: Chunk) -> Trained:
    """The local round of a few clients. It depends on nothing but its arguments, and may run in any process."""
    settings, walks = plan.settings, {}
    for client in chunk.clients:
        own = plan.task.clients[client]
        orders = epoch_orders(plan.seed, client, chunk.number, len(own), settings.local_epochs)
        walks[client] = [batch for order in orders for batch in batches(own[order], settings.batch_size)]
    outcome = Outcome(chunk.clients)
    local = local_round(
        plan,
        plan.chain_at(chunk.number),
        chunk.states,
        plan.task.train,
        chunk.clients,
        walks,
        chunk.start,
        chunk.buffers,
        chunk.number,
        outcome,
        keep=chunk.keep,
        judge=chunk.judge,
    )
    return Trained(local, outcome, chunk.states)


@dataclass
class Trace:
    """The data behind one client's upload, step by step."""

    inputs: list[Inputs] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    seen: list[Inputs] = field(default_factory=list)

    def truth(self) -> Truth:
        """All steps one behind another."""
        return Truth(join(self.inputs, torch.cat), torch.cat(self.targets), join(self.seen, torch.cat))


@dataclass(frozen=True, eq=False)
class Local:
    """What a chunk of clients has after its local round."""

    clients: list[int]
    upload: Tree  # weights or their change, protected
    buffers: Tree
    traces: dict[int, Trace]
    # Of the clients to be judged: weights before they were protected, and buffers.
    trained: dict[int, tuple[Tensors, Tensors]]


def local_round(
    plan: Plan,
    chain: Chain,
    states: ClientStates,
    examples: Examples,
    clients: list[int],
    walks: Mapping[int, Sequence[Tensor]],  # each client's batches over all epochs, as places in `examples`
    start: Tensors,
    buffers: Tree,
    number: int,
    outcome: Outcome,
    *,
    keep: Collection[int] = (),  # clients whose data are kept beside their upload
    judge: Collection[int] = (),  # clients whose weights are kept as they are before the upload is protected
) -> Local:
    """Local training of a chunk of clients and the protected upload."""
    settings = plan.settings
    # Copies from the start: every client's weights go their own way at once, and a compiled graph sees one layout.
    params = Tree.expand(start, len(clients)).map(torch.clone)
    velocity = Tree(at_rest(params, settings.momentum))
    traces = {client: Trace() for client in clients if client in keep}
    last: dict[int, Tensor] = {}
    for step in range(max(len(walks[client]) for client in clients)):
        path = ("round", number, "step", step)
        walking = [c for c in clients if step < len(walks[c]) and c not in outcome.refused]
        places = {client: plan.compose(chain, client, walks[client][step], path) for client in walking}
        active = [client for client in walking if len(places[client]) or chain.random_sizes]
        last.update({client: places[client] for client in active if len(places[client])})
        for _, members in equal_groups(active, places, states):
            rows = [clients.index(client) for client in members]
            mine, own = (params, buffers) if len(rows) == len(clients) else (params.rows(rows), buffers.rows(rows))
            data = plan.read(examples, [places[client] for client in members])
            planned = [plan.planned(chain, walks[client][step]) for client in members]
            done = group_step(plan, chain, states, members, mine, own, data, number, step, planned)
            moved, faster = sgd_step(
                mine,
                done.result.update,
                velocity.rows(rows),
                lr=settings.lr_at(number),
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            )
            params, velocity = put_rows(params, rows, moved), put_rows(velocity, rows, faster)
            buffers = put_rows(buffers, rows, done.result.buffers)
            outcome.note_loss(done)
            outcome.note_refused(done.refused)
            for row, client in enumerate(members):
                if client in traces:
                    traces[client].inputs.append(take(done.inputs, row))
                    traces[client].targets.append(done.targets[row])
                    traces[client].seen.append(take(done.result.seen, row))
        for observer in plan.observers:
            observer.on_step(number, step)
    update = params if settings.upload == "weights" else params - Tree.expand(start, len(clients))
    ended = _Ended(clients, update, params, buffers, last)
    shared = _protected(plan, chain, states, examples, ended, number, outcome)
    trained = {
        client: (own_row(params, row), own_row(buffers, row))
        for row, client in enumerate(clients)
        if client in judge and client not in outcome.refused
    }
    return Local(clients, shared, buffers, traces, trained)


@dataclass(frozen=True, eq=False)
class _Ended:
    """What a chunk of clients has at the end of its local steps."""

    clients: list[int]
    update: Tree  # what would be sent without a defense
    params: Tree
    buffers: Tree
    last: dict[int, Tensor]  # each client's last batch that was not empty


def _protected(
    plan: Plan, chain: Chain, states: ClientStates, examples: Examples, ended: _Ended, number: int, outcome: Outcome
) -> Tree:
    """The upload after its defenses. They see each client's last batch, as `Guard.upload` shows it to them.

    Clients that were refused on the way send nothing: their rows stay as they are.
    """
    clients = [client for client in ended.clients if client not in outcome.refused]
    places = [ended.clients.index(client) for client in clients]
    update, like, where = ended.update.rows(places), ended.params, f"in round {number}, the upload"
    if clients and any(defense.acts_at == "upload" for defense in chain.defenses):
        # A client whose sampling defense left every batch empty has no last batch: it shows its first example.
        first = {client: plan.task.clients[client % len(plan.task.clients)][:1] for client in clients}
        shown = {client: ended.last.get(client, first[client]) for client in clients}
        positions, parts = [], []
        for rows, members in equal_groups(clients, shown, states):
            mine = [places[row] for row in rows]
            data = plan.read(examples, [shown[client] for client in members])
            path = ("round", number, "upload")
            batch = plan.batch(members, ended.params.rows(mine), ended.buffers.rows(mine), data, path, chain)
            memory = states.gather(members, chain)
            parts.append(chain.upload(update.rows(rows), batch, memory))
            refused = refusals(members, parts[-1], like, where)
            keep_memory(states, members, memory, refused)
            outcome.note_refused(refused)
            positions.append(rows)
        update = in_order(positions, parts)
    else:
        outcome.note_refused(refusals(clients, update, like, where))
    return put_rows(ended.update, places, update) if clients else ended.update
