"""What attackers who know a defense get, beside the naive ones: MNIST test images, untrained LeNet, batch 1 to 8.

Needs MNIST's files under FEDVEIL_DATA; without them this part is left out, and says so. The clients hold 2,000 training
images; the other 58,000 are what learned attacks may learn from. Goes on from the rows of before.
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

ROLES = {"ceiling": "no defense", "naive": "naive", "adaptive": "knows the defense"}


@dataclass(frozen=True)
class Case:
    """One cell of what was to be reached."""

    defense: str
    least: str  # dB, as it was asked for
    batch: int = 1
    fedavg: bool = False
    views: int = 1  # messages about each batch

    @property
    def words(self) -> str:
        """The defense as the table calls it."""
        return self.defense if self.views == 1 else f"{self.defense}, {self.views} views"


# In this order: the last takes longest where a defense is replayed.
ATTACKS = ("inverting-gradients:steps=200,restarts=1,signed=false,polish=40", "latent-start", "learned-linear")
CASES = [
    Case("fedem", "not below the naive"),
    Case("fedcrap", "not below the naive"),
    Case("gaussian-noise:sigma=16/255", "26 (mean of 16)", views=16),
    Case("gradient-dropout:keep=0.6,match_spread=true", "35"),
    Case("fedem:radius=1024/255", "35"),
    Case("sign-compression", "18"),
    Case("gradient-pruning:prune=0.99", "16"),
    Case("gaussian-noise:sigma=16/255", "23"),
    Case("spm:epsilon=0.3", "13, 60 % identified", fedavg=True),
    Case("fedcrap:radius=1024/255", "35"),
    Case("gradient-dropout:keep=0.3", "32"),
    Case("gradient-dropout:keep=0.6", "40"),
    Case("none", "24 (learned linear)"),
    Case("none", "18", batch=4),
    Case("none", "14", batch=8),
]


def measure() -> Iterator[list[Table]]:
    torch.set_num_threads(1)
    try:
        task = fv.task("mnist", model="lenet", limit=2000)
    except FedveilError as error:
        print(f"attackers is left out: {error}")
        return
    fresh = Table(
        "Attackers who know the defense, MNIST, untrained LeNet",
        [
            "defense",
            "batch",
            "attack",
            "attacker",
            "PSNR (dB)",
            "identified among 100",
            "s per image",
            "asked for (dB)",
        ],
        "Mean with its 95 % interval over test images, 16 updates of one image or 4 of a batch. "
        f"Inverting Gradients as `{ATTACKS[0]}`, the others by default. Seconds are those of an attack in all its "
        "roles, whoever ran them first.",
    )
    table, *older = measured("attackers") or [fresh]
    for attack in ATTACKS:
        name = attack.partition(":")[0]
        for case in CASES:
            key = [case.words, str(case.batch), name]
            if key in [row[:3] for row in table.rows]:
                continue
            add(table, case, audited(task, case, attack))
            table.rows.sort(key=_place)
            for each in older:
                each.rows = [row for row in each.rows if row[:3] != key]
            yield [table, *older]


def _place(row: list[str]) -> int:
    """Where a row stands: cases in their order; sorting leaves the attacks of one as they came."""
    return [[case.words, str(case.batch)] for case in CASES].index(row[:2])


def audited(task: fv.Task, case: Case, attack: str) -> AuditResult:
    begun, victims = time.perf_counter(), 16 if case.batch == 1 else 4
    found = fv.audit(
        task,
        case.defense,
        attack,
        federation=fv.FederationSettings(protocol="fedavg", batch_size=case.batch) if case.fedavg else None,
        settings=fv.AuditSettings(
            victims=victims,
            batch_size=case.batch,
            source="test",
            link=False,
            reference="none",
            auxiliary="mnist",
            views=case.views,
        ),
        train=False,
        store=STORE,
        workers=2,
    )
    print(f"{case}, {attack}: {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def add(table: Table, case: Case, found: AuditResult) -> None:
    """A row for every attack of every attacker who faces this case."""
    for run in found.result.attacks:
        for row in found.result.rows:
            wanted = row.role in (("ceiling",) if case.defense == "none" else ("naive", "adaptive"))
            if row.attack != run.attack or row.round is not None or not wanted:
                continue
            psnr, share = row.metrics["psnr"], row.metrics["identified"]
            table.add(
                case.words,
                case.batch,
                row.attack,
                ROLES[row.role],
                f"{psnr.mean:.1f} [{psnr.low:.1f}, {psnr.high:.1f}]",
                f"{100 * share.mean:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]",
                f"{run.seconds / (run.victims * run.batch_size):.1f}",
                case.least,
            )
            print(table.rows[-1], flush=True)
