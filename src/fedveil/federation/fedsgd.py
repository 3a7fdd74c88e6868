"""FedSGD: one exchange per mini-batch (FedEM Alg. 1, FedBARRE Alg. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedveil.clients.sgd import sgd_step
from fedveil.federation.capture import Capture, Captured, Truth
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.plan import Moment, Plan
from fedveil.federation.schedule import windows
from fedveil.federation.server import Collector, Server
from fedveil.federation.steps import Group, Prepared, RoundTally, Step, equal_groups, group_step, in_order, own_row
from fedveil.tasks.inputs import take
from fedveil.tree import Tree


def fedsgd_round(
    prepared: Prepared, server: Server, memory: ClientMemory, number: int, clients: list[int]
) -> RoundTally:
    """One round: for each batch index, every client that has one sends its gradient, and the server steps at once.

    A client that has run out of batches is left out of the mean, and so is one whose update is refused. A step in
    which none is left changes nothing.
    """
    plan, tally = prepared.plan, RoundTally(number, clients)
    chain, walks = plan.chain_at(number), plan.walks(number, clients)
    for step in range(max(len(walk) for walk in walks.values())):
        moment = Moment(number, step)
        indices = {c: plan.compose(c, walk[step], moment) for c, walk in walks.items() if step < len(walk)}
        if not chain.random_sizes:
            indices = {client: chosen for client, chosen in indices.items() if len(chosen)}
        if indices:
            planned = {client: plan.planned(walks[client][step], number) for client in indices}
            _exchange(prepared, server, memory, tally, _Batches(step, indices, planned))
        for observer in prepared.observers:
            observer.on_step(number, step)
    tally.require_taken()
    memory.states.new_round(chain)
    return tally


@dataclass(frozen=True, eq=False)
class _Batches:
    """The batches of one exchange."""

    step: int
    indices: dict[int, Tensor]  # by client, of its examples
    planned: dict[int, int]  # the batch sizes before a defense drew its own


def _exchange(prepared: Prepared, server: Server, memory: ClientMemory, tally: RoundTally, batches: _Batches) -> None:
    """Gradients of all clients at the server's weights, their mean, and the server's step."""
    plan, settings, indices = prepared.plan, prepared.plan.settings, batches.indices
    moment = Moment(tally.number, batches.step)
    collector = Collector(plan, server, memory, tally.number, batches.step)
    recorded = plan.recorded(tally.number, tally.clients) if batches.step == 0 else frozenset()
    for window in windows(list(indices), prepared.engine.chunk):
        positions, steps = [], []
        refused: dict[int, str] = {}
        for where, clients in equal_groups(window, indices, memory.states):
            group = Group(
                clients,
                Tree.expand(server.params, len(clients)),
                memory.buffers_of(clients, server.buffers),
                prepared.read(plan.task.train, [indices[client] for client in clients]),
                [batches.planned[client] for client in clients],
            )
            done = group_step(prepared, memory.states, group, moment)
            positions.append(where)
            steps.append(done)
            tally.note_loss(done)
            refused |= done.refused
            tally.captured += [
                _captured(plan, server, done, row, tally.number)
                for row, client in enumerate(clients)
                if client in recorded and client not in refused
            ]
        update = in_order(positions, [done.result.update for done in steps])
        moved = in_order(positions, [done.result.buffers for done in steps])
        collector.add(window, update, moved, refused)
        tally.note_refused(refused)
    tally.taken += collector.taken
    tally.captured.sort(key=lambda captured: captured.client)
    tally.note_traffic(len(indices), server.params, server.buffers, plan.task.buffers)
    mean = collector.mean()
    if mean is None:
        return
    server.params, server.velocity = sgd_step(
        server.params,
        mean,
        server.velocity,
        lr=settings.lr_at(tally.number),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


def _captured(plan: Plan, server: Server, step: Step, row: int, number: int) -> Captured:
    shares = plan.task.buffers == "shared"
    capture = Capture(
        kind="gradient",
        before=server.params,
        shared=own_row(step.result.update, row),
        buffers=own_row(step.result.buffers, row) if shares else None,
        buffers_before=server.buffers if plan.task.buffers != "local" else None,
        client=step.clients[row],
        round=number,
        lr=(plan.settings.lr_at(number),),
        batch_sizes=(max(step.targets.shape[1], 1),),  # that a batch was drawn empty is not told
        facts=plan.facts(number),
    )
    return Captured(capture, Truth(take(step.inputs, row), step.targets[row], take(step.result.seen, row)))
