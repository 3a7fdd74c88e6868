"""Every attack that rebuilds pictures, on several data sets, undefended and under two defenses, beside its floors.

Needs the data sets' files under FEDVEIL_DATA; one whose files are missing is left out, and says so. Each attack runs at
a desk setting, named in its table; presets have the published ones. Goes on from the rows of before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

import fedveil as fv
from benchmarks.tables import STORE, Table, measured
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import Row
from fedveil.errors import FedveilError
from fedveil.leakage import lpips
from fedveil.leakage.intervals import bootstrap

DEFENSES = ("none", "gradient-dropout:keep=0.6", "gaussian-noise:sigma=0.008")
UPDATES = {1: 5, 4: 2, 8: 2}  # attacked, by batch size


@dataclass(frozen=True)
class Field:
    """A data set with a model, and what is run on it."""

    data: str
    model: str
    attacks: tuple[str, ...]
    batch: int = 1
    defenses: tuple[str, ...] = DEFENSES
    limit: int = 2000  # images that clients hold

    @property
    def title(self) -> str:
        """Of the table that it is in."""
        batches = "" if self.batch == 1 else ", in batches"
        return f"Every attack on {self.data}, {self.model}, untrained{batches}, at a desk setting"

    def faced_by(self, defense: str) -> list[str]:
        """The attacks that a defense faces here."""
        if defense not in self.defenses:
            return []
        return [each for each in self.attacks if defense == "none" or each not in FIRST]

    @property
    def auxiliary(self) -> str:
        """The rest of a large set; of a small one, what is held out."""
        return "held-out" if self.data == "pneumoniamnist" else self.data


INVERTING = "inverting-gradients:steps=200,restarts=1,signed=false"
LEARNED = ("learned-linear", "lti", "gias", "latent-start")
FIRST = ("dlg:steps=60", "idlg:steps=60")  # known to fail under defenses: undefended only
SMALL = (*FIRST, INVERTING, "grad-inversion:seeds=2", "ci-net", *LEARNED, "mjolnir:steps=200,restarts=1")
# A step of `convnet` takes fifty times as long as one of `lenet`, and one of `resnet18` ten times that.
LARGE = (
    "inverting-gradients:steps=200,restarts=1,polish=2",
    "grad-inversion:steps=100,seeds=2,polish=2",
    "ci-net:steps=100,polish=2",
    "learned-linear",
    "lti:steps=500,most=4000",
    "gias:steps=100,weight_steps=50",
    "latent-start:steps=100,polish=2",
)
LARGEST = ("inverting-gradients:steps=60,restarts=1,polish=0", "learned-linear:most=300")
# Polishing needs second derivatives, which networks of sigmoids have: as Gradient Dropout's experiments use them.
SMOOTH = ("inverting-gradients:steps=40,restarts=1,polish=5", "learned-linear:most=300")
BATCHED = (
    f"{INVERTING},polish=10",
    "grad-inversion:steps=200,seeds=2,polish=10",
    "ci-net:steps=200,polish=10",
    "gias:steps=100,weight_steps=50",
    "latent-start:polish=10",
    "learned-linear",
)
OF_FOUR = ("lti:steps=500", "learned-linear")  # LTI's paper has batches of 4
FIELDS = (
    Field("mnist", "lenet", SMALL),
    Field("pneumoniamnist", "lenet", SMALL),
    Field("cifar10", "lenet", SMALL[2:]),
    Field("fashion-mnist", "lenet", SMALL, defenses=("none",)),
    Field("cifar10", "resnet18:norm=group", LARGEST, defenses=("none",)),
    # The papers' batches.
    *(Field(data, "lenet", BATCHED, 8) for data in ("mnist", "cifar10", "pneumoniamnist")),
    *(Field(data, "lenet", OF_FOUR, 4) for data in ("mnist", "cifar10", "pneumoniamnist")),
    # Last, as they take longest.
    Field("cifar10", "resnet18:activation=sigmoid", SMOOTH, defenses=("none",)),
    Field("cifar10", "convnet:width=16", LARGE, defenses=("none",)),
)


def measure() -> Iterator[list[Table]]:
    torch.set_num_threads(1)
    tables = {table.title: table for table in measured("every-attack")}
    for defense in DEFENSES:  # what is stopped has something of every field
        for field in FIELDS:
            table = tables.get(field.title) or Table(field.title, HEAD)
            table.note = note_of(field)
            known = {row[2] for row in table.rows if row[:2] == [defense, str(field.batch)]}
            missing = [each for each in field.faced_by(defense) if each.partition(":")[0] not in known]
            task = task_of(field) if missing else None
            if task is not None:
                tables[field.title] = table
                add(table, defense, field.batch, audited(task, field, defense, missing))
                table.rows.sort(key=_place)
                yield list(tables.values())


def _place(row: list[str]) -> tuple[int, int, bool]:
    """Where a row stands: by batch, then defense; guesses behind attacks. Sorting leaves the others as they came."""
    return int(row[1]), DEFENSES.index(row[0]), row[3] == GUESS


def task_of(field: Field) -> fv.Task | None:
    """Its task; None where the files are missing."""
    try:
        return fv.task(field.data, model=field.model, limit=field.limit)
    except FedveilError as error:
        print(f"every-attack leaves {field.data} out: {error}")
        return None


HEAD = [
    "defense",
    "batch",
    "attack",
    "attacker",
    "PSNR (dB)",
    "SSIM",
    "LPIPS (VGG-16)",
    "identified",
    "s per image",
]


def note_of(field: Field) -> str:
    """What stands over its table."""
    fields = [other for other in FIELDS if other.title == field.title]
    settings = dict.fromkeys(f"`{each}`" for other in fields for each in other.attacks)
    updates = " and ".join(f"{UPDATES[other.batch]} updates of {other.batch}" for other in fields)
    return (
        f"Mean over test images of {updates}, with its 95 % interval for PSNR; identified among 100. Seconds are those "
        "of an attack in all its roles, without what it learns before, on two busy cores. The mean image and the "
        "picture's own mean color are what a guess gets: an attack below them shows nothing. Settings: "
        + ", ".join(settings)
        + "."
    )


def audited(task: fv.Task, field: Field, defense: str, attacks: list[str]) -> AuditResult:
    begun = time.perf_counter()
    found = fv.audit(
        task,
        defense,
        attacks,
        settings=fv.AuditSettings(
            victims=UPDATES[field.batch],
            batch_size=field.batch,
            source="test",
            link=False,
            reference="none",
            auxiliary=field.auxiliary,
            lpips="vgg" if _has_lpips() else "none",
        ),
        train=False,
        store=STORE,
        workers=2,
    )
    seconds = time.perf_counter() - begun
    print(f"{field.data}, {field.model}, batch {field.batch}, {defense}, {len(attacks)}: {seconds:.0f} s", flush=True)
    return found


def _has_lpips() -> bool:
    try:
        lpips.load("vgg")
    except FedveilError as error:
        print(f"LPIPS is left out: {error}")
        return False
    return True


# ---- rows ---------------------------------------------------------------------------------------------------

GUESS = "a guess"
WHO = {"ceiling": "", "naive": "naive", "adaptive": "knows the defense", "noise-floor": "noise for the update"}


def add(table: Table, defense: str, batch: int, found: AuditResult) -> None:
    """A row for every attack and attacker of an audit, and what guesses get."""
    seconds = {run.attack: run.seconds / (run.victims * run.batch_size) for run in found.result.attacks}
    for attack in seconds:
        for role in ("ceiling",) if defense == "none" else ("naive", "adaptive"):
            row = found.result.row(role, attack)  # type: ignore[arg-type]
            if row is not None:
                table.add(defense, batch, attack, WHO[role], *_numbers(row), f"{seconds[attack]:.1f}")
    mean, guessed = found.result.row("mean-floor"), [defense, str(batch), GUESS]
    if mean is not None and guessed not in [[*row[:2], row[3]] for row in table.rows]:
        table.add(defense, batch, "mean image", GUESS, *_numbers(mean), "")
        table.add(defense, batch, "own mean color", GUESS, _own_color(found), "", "", "", "")


def _numbers(row: Row) -> tuple[str, str, str, str]:
    psnr = row.metrics["psnr"]
    share = row.metrics["identified"]
    return (
        f"{psnr.mean:.1f} [{psnr.low:.1f}, {psnr.high:.1f}]",
        f"{row.metrics['ssim'].mean:.2f}",
        f"{row.metrics['lpips'].mean:.2f}" if "lpips" in row.metrics else "",
        f"{100 * share.mean:.0f} %",
    )


def _own_color(found: AuditResult) -> str:
    """What a picture of nothing but its mean color gets. In [0, 1] pixels: for PSNR of all channels at one range."""
    originals = found.images.originals
    flat = originals.mean(axis=(2, 3), keepdims=True)
    errors = ((originals - flat) ** 2).mean(axis=(2, 3))
    each = (-10 * np.log10(np.maximum(errors, 1e-10))).mean(axis=1)
    interval = bootstrap(each)
    return f"{interval.mean:.1f} [{interval.low:.1f}, {interval.high:.1f}]"
