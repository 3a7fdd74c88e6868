"""FedSGD: one exchange per mini-batch (FedEM Alg. 1, FedBARRE Alg. 1)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedveil.clients.sgd import sgd_step
from fedveil.defenses.chain import Chain
from fedveil.federation.capture import Capture, Captured, Truth
from fedveil.federation.schedule import batches, epoch_orders, windows
from fedveil.federation.server import Collector, Server
from fedveil.federation.steps import Outcome, Plan, Step, equal_groups, group_step, in_order, own_row, require_taken
from fedveil.tasks.inputs import take
from fedveil.tree import Tree


def fedsgd_round(plan: Plan, server: Server, number: int, clients: list[int]) -> Outcome:
    """One round: for each batch index, every client that has one sends its gradient, and the server steps at once.

    A client that has run out of batches is left out of the mean, and so is one whose update is refused. A step in
    which none is left changes nothing.
    """
    task, settings, chain = plan.task, plan.settings, plan.chain_at(number)
    outcome = Outcome(clients)
    walks = {}
    for client in clients:
        own = task.clients[client]
        order = epoch_orders(plan.seed, client, number, len(own))[0]
        walks[client] = batches(own[order], settings.batch_size)
    for step in range(max(len(walk) for walk in walks.values())):
        path = ("round", number, "step", step)
        places = {c: plan.compose(chain, c, walk[step], path) for c, walk in walks.items() if step < len(walk)}
        if not chain.random_sizes:
            places = {client: chosen for client, chosen in places.items() if len(chosen)}
        if places:
            planned = {client: plan.planned(chain, walks[client][step]) for client in places}
            _exchange(plan, server, chain, outcome, number, step, places, planned)
        for observer in plan.observers:
            observer.on_step(number, step)
    require_taken(outcome, number)
    server.states.new_round(chain)
    return outcome


def _exchange(
    plan: Plan,
    server: Server,
    chain: Chain,
    outcome: Outcome,
    number: int,
    step: int,
    places: Mapping[int, Tensor],
    planned: Mapping[int, int],
) -> None:
    """Gradients of all clients at the server's weights, their mean, and the server's step."""
    settings = plan.settings
    collector = Collector(plan, server, "round", number, "step", step)
    recorded: set[int] = set()
    if step == 0 and number in settings.record_rounds:
        recorded = set(outcome.clients[: settings.record_clients])
    for window in windows(list(places), plan.engine.chunk):
        positions, steps = [], []
        refused: dict[int, str] = {}
        for where, clients in equal_groups(window, places, server.states):
            data = plan.read(plan.task.train, [places[client] for client in clients])
            params, buffers = Tree.expand(server.params, len(clients)), server.buffers_of(plan, clients)
            sizes = [planned[client] for client in clients]
            done = group_step(plan, chain, server.states, clients, params, buffers, data, number, step, sizes)
            positions.append(where)
            steps.append(done)
            outcome.note_loss(done)
            refused |= done.refused
            outcome.captured += [
                _captured(plan, server, chain, done, row, number)
                for row, client in enumerate(clients)
                if client in recorded and client not in refused
            ]
        update = in_order(positions, [done.result.update for done in steps])
        moved = in_order(positions, [done.result.buffers for done in steps])
        collector.add(window, update, moved, trusted=chain.aggregates, refused=refused)
        outcome.note_refused(refused)
    outcome.taken += collector.taken
    outcome.captured.sort(key=lambda captured: captured.capture.client)
    outcome.note_traffic(len(places), server.params, server.buffers, plan.task.buffers)
    mean = collector.mean(number)
    if mean is None:
        return
    server.params, server.velocity = sgd_step(
        server.params,
        mean,
        server.velocity,
        lr=settings.lr_at(number),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


def _captured(plan: Plan, server: Server, chain: Chain, step: Step, row: int, number: int) -> Captured:
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
        facts=plan.facts(chain),
    )
    return Captured(capture, Truth(take(step.inputs, row), step.targets[row], take(step.result.seen, row)))
