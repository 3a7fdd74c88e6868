"""Naive against informed: Inverting Gradients under every registered defense, at two models and two batch sizes.

Needs MNIST's files under FEDVEIL_DATA; without them this part is left out, and says so. Victims are images of clients,
which no other table has. The trained model had one round of plain FedSGD: all defenses are attacked at the same two
models, so that the undefended attack and its floors are the same in all rows. Goes on from the rows of before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context

import torch

import fedveil as fv
from benchmarks.tables import STORE, Table, measured
from fedveil.auditing.result import Row
from fedveil.defenses.base import Defense
from fedveil.errors import FedveilError
from fedveil.leakage.intervals import paired
from fedveil.registry import defenses

ATTACK = fv.attacks.InvertingGradients(steps=100, restarts=1, signed=False, polish=8)
LIMIT = 2000  # images that the clients hold
VICTIMS = {1: 6, 4: 3}  # updates by batch size
# Instead of a defense's defaults: where these do nothing or take long, or where two strengths say more than one.
SETTINGS = {
    "none": (),
    "cdp": (),  # acts on the server, which is the attacker here
    "fedem": ("fedem", "fedem:radius=1024/255"),
    "fedcrap": ("fedcrap", "fedcrap:radius=1024/255"),
    "gaussian-noise": ("gaussian-noise", "gaussian-noise:sigma=16/255"),
    "gradient-dropout": ("gradient-dropout", "gradient-dropout:keep=0.3,match_spread=true"),
    "sign-compression": ("sign-compression", "sign-compression:flip=0.3"),
    "soteria": ("soteria:features=16",),
}


@dataclass(frozen=True)
class Cell:
    """One defense at one model and batch size."""

    defense: str
    batch: int
    trained: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """What its row begins with."""
        return str(self.batch), "one round" if self.trained else "untrained", self.defense

    @property
    def federation(self) -> fv.FederationSettings:
        """One local step of FedAvg for what protects uploads, else FedSGD."""
        defense: Defense = defenses.parse(self.defense)
        protocol = "fedavg" if defense.acts_at == "upload" else "fedsgd"
        return fv.FederationSettings(protocol=protocol, batch_size=self.batch)


def cells() -> list[Cell]:
    """All of them, the cheap ones first."""
    specs = [spec for name in defenses.entries() for spec in SETTINGS.get(name, (name,))]
    return [Cell(spec, batch, trained) for batch in VICTIMS for trained in (False, True) for spec in specs]


def measure() -> Iterator[list[Table]]:
    try:
        tasks()
    except FedveilError as error:
        print(f"every-defense is left out: {error}")
        return
    table = Table(
        f"Naive against informed under every defense: MNIST, LeNet, {ATTACK.steps} steps of Inverting Gradients",
        ["batch", "model", "defense", "undefended", "naive", "knows the defense", "difference"],
        "PSNR in dB, mean over images of clients, "
        + " or ".join(f"{count} updates of {batch}" for batch, count in VICTIMS.items())
        + "; the difference with its paired 95 % interval over updates. One try of the gradient itself, polished. What "
        "protects uploads sees one local step of FedAvg.",
    )
    known = {tuple(row[:3]): row for each in measured("every-defense") for row in each.rows}
    missing = [cell for cell in cells() if cell.key not in known]
    with processes() as pool:
        for cell, row in zip(missing, pool.map(row_of, missing), strict=True):
            known[cell.key] = row
            table.rows = [known[each.key] for each in cells() if each.key in known]
            print(row, flush=True)
            yield [table]


def processes() -> ProcessPoolExecutor:
    """One for every core, with one thread each."""
    return ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))


@cache
def tasks() -> dict[bool, fv.Task]:
    """The task with an untrained and with a trained model."""
    untrained = fv.task("mnist", model="lenet", limit=LIMIT)
    return {False: untrained, True: after_one_round(untrained)}


def after_one_round(task: fv.Task) -> fv.Task:
    """The same with a model that learned for one round, without a defense."""
    model = deepcopy(task.model)
    model.load_state_dict(fv.federate(task, None, fv.FederationSettings(rounds=1, lr=0.5), seed=1).params)
    return fv.task("mnist", model=model, limit=LIMIT)


def row_of(cell: Cell) -> list[str]:
    """The row of a cell. The store has the undefended attack and its floor, which are the same for all."""
    begun = time.perf_counter()
    found = fv.audit(
        tasks()[cell.trained],
        cell.defense,
        ATTACK,
        federation=cell.federation,
        settings=fv.AuditSettings(victims=VICTIMS[cell.batch], batch_size=cell.batch, link=False, reference="none"),
        train=False,
        store=STORE,
        seed=1,
    )
    print(f"{cell}: {time.perf_counter() - begun:.0f} s", flush=True)
    rows: dict[str, Row] = {row.role: row for row in found.result.rows if row.attack == ATTACK.name}
    psnr = [f"{rows[role].metrics['psnr'].mean:.1f}" for role in ("ceiling", "naive", "adaptive")]
    return [*cell.key, *psnr, _gain(rows, cell)]


def _gain(rows: dict[str, Row], cell: Cell) -> str:
    knows, naive = rows["adaptive"].values["psnr"], rows["naive"].values["psnr"]
    gain = paired(knows, naive, groups=[place // cell.batch for place in range(len(knows))])
    worse = " **worse**" if gain.high < 0 else ""
    return f"{gain.mean:+.1f} [{gain.low:+.1f}, {gain.high:+.1f}]{worse}"
