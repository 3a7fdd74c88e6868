"""How much the clients of a run send: what the ledger composes over."""

from __future__ import annotations

from fedveil.defenses.guarantee import Exposure
from fedveil.federation.schedule import sampled_clients
from fedveil.federation.settings import FederationSettings
from fedveil.tasks.task import Task


def exposures(
    task: Task, federation: FederationSettings, *, rounds: int | None = None, trained: int | None = None
) -> list[Exposure]:
    """What a client of each size sends over a run, for the ledger.

    rounds: over so many rounds with the defense, and none without, in place of the run's.
    trained: how many rounds the run had if it stopped early.
    """
    clients, run = len(task.clients), federation.rounds if trained is None else trained
    warmup = min(federation.warmup_rounds, run) if rounds is None else 0
    weights = [p for p in task.model.parameters() if p.requires_grad]
    dtypes = tuple(sorted({str(p.dtype).removeprefix("torch.") for p in weights}))
    found = []
    for size in sorted({len(members) for members in task.clients}):
        batches = -(-size // federation.batch_size)
        one_by_one = federation.protocol == "fedsgd"
        found.append(
            Exposure(
                parameters=sum(p.numel() for p in weights),
                rounds=run - warmup if rounds is None else rounds,
                steps_per_round=batches if one_by_one else 1,
                sampling_rate=len(sampled_clients(0, clients, federation.sampling_rate, 1)) / clients,
                example_rate=min(1.0, federation.batch_size / size),
                delta=min(1e-5, 1 / len(task.train)),
                local_steps=1 if one_by_one else batches * federation.local_epochs,
                bare_rounds=warmup,
                bare_buffers=task.buffers == "shared" and any(b.is_floating_point() for b in task.model.buffers()),
                dtypes=dtypes,
            )
        )
    return found
