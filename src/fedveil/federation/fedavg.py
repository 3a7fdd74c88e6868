"""FedAvg: local epochs of SGD, then one upload per client and round (SPM-FL Alg. 1)."""

from __future__ import annotations

from fedveil.defenses.chain import Chain
from fedveil.federation.capture import Capture, Captured
from fedveil.federation.chunk_workers import trained_chunks
from fedveil.federation.local import Chunk, Local
from fedveil.federation.schedule import windows
from fedveil.federation.server import Collector, Server
from fedveil.federation.steps import Outcome, Plan, own_row, require_taken


def fedavg_round(plan: Plan, server: Server, number: int, clients: list[int]) -> Outcome:
    """One round: every client trains from the server's weights and uploads, the server takes the mean.

    A client whose training or upload breaks is left out of it.
    A chunk of clients goes through its whole local round before the next one starts: memory stays bounded.
    """
    task, settings, chain = plan.task, plan.settings, plan.chain_at(number)
    outcome = Outcome(clients)
    recorded = frozenset(clients[: settings.record_clients] if number in settings.record_rounds else ())
    judged = frozenset(clients[: settings.local_utility] if settings.evaluates(number) else ())
    collector = Collector(plan, server, "round", number)
    chunks = (
        Chunk(
            window,
            number,
            server.params,
            server.buffers_of(plan, window),
            server.states.of(window),
            keep=recorded.intersection(window),
            judge=judged.intersection(window),
        )
        for window in windows(clients, plan.engine.chunk)
    )
    for trained in trained_chunks(plan, chunks, number):
        local = trained.local
        server.states.put(trained.states)
        server.trained |= local.trained
        outcome.loss += trained.outcome.loss
        outcome.examples += trained.outcome.examples
        refused = trained.outcome.refused
        outcome.note_refused(refused)
        collector.add(local.clients, local.upload, local.buffers, trusted=chain.aggregates, refused=refused)
        outcome.captured += [
            _captured(plan, server, chain, local, row, number)
            for row, client in enumerate(local.clients)
            if client in recorded and client not in refused and local.traces[client].targets
        ]
    outcome.note_traffic(len(clients), server.params, server.buffers, task.buffers)
    outcome.taken = collector.taken
    require_taken(outcome, number)
    mean = collector.mean(number)
    assert mean is not None  # some update was taken
    if settings.upload == "delta":
        mean = {name: weight + mean[name] for name, weight in server.params.items()}
    server.params = mean
    server.states.new_round(chain)
    return outcome


def _captured(plan: Plan, server: Server, chain: Chain, local: Local, row: int, number: int) -> Captured:
    client = local.clients[row]
    trace = local.traces[client]
    shares = plan.task.buffers == "shared"
    sizes = tuple(max(len(targets), 1) for targets in trace.targets)  # that a batch was drawn empty is not told
    capture = Capture(
        kind=plan.settings.message,
        before=server.params,
        shared=own_row(local.upload, row),
        buffers=own_row(local.buffers, row) if shares else None,
        buffers_before=server.buffers if plan.task.buffers != "local" else None,
        client=client,
        round=number,
        steps=len(sizes),
        lr=(plan.settings.lr_at(number),) * len(sizes),
        momentum=plan.settings.momentum,
        batch_sizes=sizes,
        facts=plan.facts(chain),
    )
    return Captured(capture, trace.truth())
