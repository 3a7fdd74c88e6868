"""Attacks on FedAvg updates: several local steps and epochs in an unknown order, momentum; and labels read off them.

Needs MNIST's files under FEDVEIL_DATA; without them this part is left out, and says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import fedveil as fv
from benchmarks.tables import Table
from fedveil.auditing.audit_result import AuditResult
from fedveil.errors import FedveilError

ATTACK = "inverting-gradients:steps=200,restarts=1,signed=false"
LABELS = f"{ATTACK},labels=recovered,polish=0".replace("steps=200", "steps=2")  # whose pictures do not matter


@dataclass(frozen=True)
class Round:
    """Local training behind one update."""

    examples: int
    batch: int
    epochs: int = 1
    momentum: float = 0.0
    lr: float = 0.1

    @property
    def words(self) -> str:
        """As a cell of a table."""
        steps = -(-self.examples // self.batch)
        told = f"{self.examples} examples, {self.epochs} epochs of {steps} steps, rate {self.lr:g}"
        return told + (f", momentum {self.momentum:g}" if self.momentum else "")

    @property
    def federation(self) -> fv.FederationSettings:
        return fv.FederationSettings(
            protocol="fedavg", batch_size=self.batch, local_epochs=self.epochs, momentum=self.momentum, lr=self.lr
        )


ROUNDS = (Round(4, 4), Round(4, 1), Round(4, 2, epochs=4), Round(4, 2, epochs=2, momentum=0.9))
WAYS = (("pseudo-gradient", "mean"), ("unrolled", "same"), ("unrolled", "mean"), ("unrolled", "searched"))
READ = (Round(16, 16), Round(16, 4, epochs=4), Round(32, 8, epochs=10), Round(16, 4, epochs=4, momentum=0.9))


def measure() -> list[Table]:
    torch.set_num_threads(2)
    try:
        tasks = {model: fv.task("mnist", model=model, limit=2000) for model in ("lenet", "mlp")}
    except FedveilError as error:
        print(f"fedavg-attacks is left out: {error}")
        return []
    return [pictures(tasks["lenet"]), labels(tasks)]


def pictures(task: fv.Task) -> Table:
    table = Table(
        "FedAvg updates of MNIST, untrained LeNet: what repeating the local steps gains",
        ["local training", "attacked as", "PSNR (dB)", "identified among 100"],
        f"Mean with its 95 % interval over 4 updates. `{ATTACK}`, labels known but not their order. Unrolled: with the "
        "same order in every epoch, with the mean gradient in every step, or with the order searched for.",
    )
    for each in ROUNDS:
        for way, order in WAYS[:1] + WAYS[3:] if each.batch == each.examples else WAYS:
            row = audited(task, each, ATTACK, way, order, 4).result.row("ceiling")
            assert row is not None
            psnr, share = row.metrics["psnr"], row.metrics["identified"]
            table.add(
                each.words,
                way if way != "unrolled" or each.batch == each.examples else f"{way}, {order}",
                f"{psnr.mean:.1f} [{psnr.low:.1f}, {psnr.high:.1f}]",
                f"{100 * share.mean:.0f} %",
            )
            print(table.rows[-1], flush=True)
    return table


def labels(tasks: dict[str, fv.Task]) -> Table:
    table = Table(
        "Labels read off FedAvg updates of MNIST",
        ["model", "local training", "labels read off rightly"],
        "The share of the labels of 8 updates, as a multiset, with its 95 % interval; untrained models.",
    )
    for model, task in tasks.items():
        for each in READ:
            (run,) = audited(task, each, LABELS, "pseudo-gradient", "mean", 8).result.attacks
            found = run.label_recovery
            assert found is not None
            share = f"{100 * found.mean:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}]"
            table.add(model, each.words, share)
            print(table.rows[-1], flush=True)
    return table


def audited(task: fv.Task, each: Round, attack: str, way: str, order: str, victims: int) -> AuditResult:
    begun = time.perf_counter()
    settings = fv.AuditSettings(
        victims=victims,
        batch_size=each.examples,
        local_steps=way,  # type: ignore[arg-type]
        step_order=order,  # type: ignore[arg-type]
        link=False,
        reference="none",
    )
    found = fv.audit(task, None, attack, federation=each.federation, settings=settings, train=False)
    print(f"{each}, {way}, {order}: {time.perf_counter() - begun:.0f} s", flush=True)
    return found
