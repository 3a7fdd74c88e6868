"""How much the clients of a run send, by plan and as it happened: what the ledger composes over."""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure
from fedveil.federation.history import RoundRecord
from fedveil.federation.schedule import sampled_clients
from fedveil.federation.settings import FederationSettings
from fedveil.ledger.ledger import EVERYONE, Ledger, Release
from fedveil.tasks.task import Task


def exposures(
    task: Task, federation: FederationSettings, *, rounds: int | None = None, trained: int | None = None
) -> list[Exposure]:
    """What a client of each size sends over a run by plan, if it takes part in every round.

    rounds: over so many rounds with the defense, and none without, in place of the run's.
    trained: how many rounds the run had if it stopped early.
    """
    run = federation.rounds if trained is None else trained
    warmup = min(federation.warmup_rounds, run) if rounds is None else 0
    return [
        _exposure(task, federation, size, run - warmup if rounds is None else rounds, warmup)
        for size in sorted({len(members) for members in task.clients})
    ]


def ledger_of(task: Task, federation: FederationSettings, chain: Chain, history: Sequence[RoundRecord]) -> Ledger:
    """The ledger of a run, from the rounds that were run and the clients that took part in them.

    A client whose update was refused has sent it all the same. Where a trusted server adds the noise, what counts is in
    how many rounds a client may have been drawn, not in how many it was: whoever sees the models does not know that.
    """
    warmup = min(federation.warmup_rounds, len(history))
    whole = _exposure(task, federation, max(map(len, task.clients)), len(history) - warmup, warmup)
    ledger = Ledger(whole)
    kinds = {size: _exposure(task, federation, size, 1, 0) for size in {len(members) for members in task.clients}}
    for record in history:
        used = Chain() if record.round <= federation.warmup_rounds else chain
        for client in record.clients:
            one = kinds[len(task.clients[client])]
            release = Release(used, gradients=one.local_steps, example_rate=one.example_rate)
            ledger.spend(client, release, one.steps_per_round)
        if used.aggregates:
            mean = Release(used, 0, 0, means=whole.steps_per_round, client_rate=whole.sampling_rate)
            ledger.spend(EVERYONE, mean)
    return ledger


def _exposure(task: Task, federation: FederationSettings, size: int, rounds: int, bare_rounds: int) -> Exposure:
    """What a client with `size` examples sends over some rounds."""
    clients, batches = len(task.clients), -(-size // federation.batch_size)
    one_by_one = federation.protocol == "fedsgd"
    weights = [p for p in task.model.parameters() if p.requires_grad]
    return Exposure(
        parameters=sum(p.numel() for p in weights),
        rounds=rounds,
        steps_per_round=batches if one_by_one else 1,
        sampling_rate=len(sampled_clients(0, clients, federation.sampling_rate, 1)) / clients,
        example_rate=min(1.0, federation.batch_size / size),
        delta=min(1e-5, 1 / len(task.train)),
        local_steps=1 if one_by_one else batches * federation.local_epochs,
        bare_rounds=bare_rounds,
        bare_buffers=task.buffers == "shared" and any(b.is_floating_point() for b in task.model.buffers()),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in weights})),
    )
