"""FedAvg: local epochs of SGD, then one upload per client and round (SPM-FL Alg. 1)."""

from __future__ import annotations

from fedveil.federation.capture import Capture, Captured
from fedveil.federation.chunk_workers import trained_chunks
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.local import Chunk, Trained
from fedveil.federation.plan import Plan
from fedveil.federation.schedule import windows
from fedveil.federation.server import Collector, Server
from fedveil.federation.steps import Prepared, RoundTally, own_row


def fedavg_round(
    prepared: Prepared, server: Server, memory: ClientMemory, number: int, clients: list[int]
) -> RoundTally:
    """One round: every client trains from the server's weights and uploads, the server takes the mean.

    A client whose training or upload breaks is left out of it.
    A chunk of clients goes through its whole local round before the next one starts: memory stays bounded.
    """
    plan, settings, tally = prepared.plan, prepared.plan.settings, RoundTally(number, clients)
    recorded = plan.recorded(number, clients)
    judged = frozenset(clients[: settings.local_utility] if settings.evaluates(number) else ())
    collector = Collector(plan, server, memory, number)
    chunks = (
        Chunk(
            window,
            number,
            server.params,
            memory.buffers_of(window, server.buffers),
            memory.states.of(window),
            keep=recorded.intersection(window),
            judge=judged.intersection(window),
        )
        for window in windows(clients, prepared.engine.chunk)
    )
    for trained in trained_chunks(prepared, chunks, number):
        memory.states.put(trained.states)
        tally.trained |= trained.tally.trained
        tally.loss += trained.tally.loss
        tally.examples += trained.tally.examples
        refused = trained.tally.refused
        tally.note_refused(refused)
        collector.add(trained.clients, trained.upload, trained.buffers, refused)
        tally.captured += [
            _captured(plan, server, trained, row, number)
            for row, client in enumerate(trained.clients)
            if client in recorded and client not in refused and trained.data[client].targets
        ]
    tally.note_traffic(len(clients), server.params, server.buffers, plan.task.buffers)
    tally.taken = collector.taken
    tally.require_taken()
    mean = collector.mean()
    assert mean is not None  # some update was taken
    if settings.upload == "delta":
        mean = {name: weight + mean[name] for name, weight in server.params.items()}
    server.params = mean
    memory.states.new_round(plan.chain_at(number))
    return tally


def _captured(plan: Plan, server: Server, trained: Trained, row: int, number: int) -> Captured:
    client = trained.clients[row]
    data = trained.data[client]
    shares = plan.task.buffers == "shared"
    sizes = tuple(max(len(targets), 1) for targets in data.targets)  # that a batch was drawn empty is not told
    capture = Capture(
        kind=plan.settings.message,
        before=server.params,
        shared=own_row(trained.upload, row),
        buffers=own_row(trained.buffers, row) if shares else None,
        buffers_before=server.buffers if plan.task.buffers != "local" else None,
        client=client,
        round=number,
        steps=len(sizes),
        lr=(plan.settings.lr_at(number),) * len(sizes),
        momentum=plan.settings.momentum,
        batch_sizes=sizes,
        facts=plan.facts(number),
    )
    return Captured(capture, data.truth())
