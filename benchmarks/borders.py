"""Where the undefended attack stops working: models by batch size, beside the mean image.

Needs the files of MNIST and CIFAR-10 under FEDVEIL_DATA; without them this part is left out, and says so.
Goes on from the rows of before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import fedveil as fv
from benchmarks.tables import STORE, Table, measured
from fedveil.auditing.audit_result import AuditResult
from fedveil.errors import FedveilError

BATCHES = (1, 4, 8, 16, 32)


@dataclass(frozen=True)
class Subject:
    """A model, and what it is attacked with."""

    data: str
    model: str
    attacks: tuple[str, ...]
    batches: tuple[int, ...] = BATCHES
    updates: tuple[int, ...] = (16, 4, 2, 2, 2)  # attacked, by batch size


MATCHED = "inverting-gradients:steps=200,restarts=1,signed=false,polish=40"
SHORT = MATCHED.replace("polish=40", "polish=5")  # a step of `convnet` takes many times as long
SUBJECTS = (
    Subject("mnist", "mlp", ("analytic",)),
    Subject("mnist", "lenet", (MATCHED, "latent-start", "learned-linear")),
    Subject("mnist", "lenet5", (MATCHED, "latent-start", "learned-linear")),
    Subject("cifar10", "lenet", (MATCHED, "latent-start", "learned-linear"), (1, 4, 8)),
    Subject("cifar10", "convnet:width=16", (SHORT, "latent-start:polish=5"), (1, 4), (4, 2)),
)


def measure() -> Iterator[list[Table]]:
    torch.set_num_threads(1)
    fresh = Table(
        "Where the undefended attack stops working: untrained models by batch size",
        ["data", "model", "batch", "attack", "PSNR (dB)", "mean image (dB)", "identified among 100", "works"],
        "Mean with its 95 % interval over test images of 16 updates of one, 4 of four, 2 of more. An attack works "
        "where its whole interval of PSNR lies above the mean image, or that of the identified share above 10 %. "
        f"Inverting Gradients as `{MATCHED}`. On `convnet`, 4 updates of one, 2 of four, and no more than 5 steps of "
        "polish.",
    )
    table = next(iter(measured("borders")), fresh)
    table.note = fresh.note
    for subject in SUBJECTS:
        try:
            task = fv.task(subject.data, model=subject.model, limit=2000)
        except FedveilError as error:
            print(f"borders leaves {subject.data} out: {error}")
            continue
        for batch, updates in zip(subject.batches, subject.updates, strict=False):
            if [subject.data, subject.model, str(batch)] in [row[:3] for row in table.rows]:
                continue
            add(table, subject, batch, audited(task, subject, batch, updates))
            yield [table]


def audited(task: fv.Task, subject: Subject, batch: int, updates: int) -> AuditResult:
    begun = time.perf_counter()
    settings = fv.AuditSettings(
        victims=updates,
        batch_size=batch,
        source="test",
        link=False,
        reference="none",
        auxiliary=subject.data,
    )
    found = fv.audit(task, None, subject.attacks, settings=settings, train=False, store=STORE, workers=2)
    print(f"{subject.model}, {subject.data}, batch {batch}: {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def add(table: Table, subject: Subject, batch: int, found: AuditResult) -> None:
    """A row for every attack."""
    mean = found.leakage["mean-floor", "psnr"].mean
    for run in found.result.attacks:
        row = found.result.row("ceiling", run.attack)
        assert row is not None
        psnr, share = row.metrics["psnr"], row.metrics["identified"]
        works = psnr.low > mean or share.low > 0.1
        table.add(
            subject.data,
            subject.model,
            batch,
            run.attack,
            f"{psnr.mean:.1f} [{psnr.low:.1f}, {psnr.high:.1f}]",
            f"{mean:.1f}",
            f"{100 * share.mean:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]",
            "yes" if works else "**no**",
        )
        print(table.rows[-1], flush=True)
