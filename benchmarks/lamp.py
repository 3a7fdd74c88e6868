"""What LAMP finds of sentences of CoLA, one by one: minutes for each.

Needs what `benchmarks/text.py` does. The attack is run by itself on gradients without a defense: no floors but one, the
same attack on noise, which is what its language prior gets alone. Goes on from the rows of before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedveil as fv
from benchmarks.tables import STORE, Table, measured
from benchmarks.text import ENCODER, TOKENS, short_sentences, task_of
from fedveil.attacks.lab import Lab
from fedveil.attacks.lamp import LAMP
from fedveil.attacks.scene import Public, Scene
from fedveil.auditing.attacking import noise_like
from fedveil.defenses.updates import Updates, with_gradient
from fedveil.errors import FedveilError
from fedveil.leakage.intervals import bootstrap
from fedveil.leakage.modalities import modality_of
from fedveil.leakage.sentence_scores import arranged, compared
from fedveil.streams import Streams
from fedveil.tasks.text_form import NO_TOKEN, tokens_of
from fedveil.tree import Tree

SHARES = ("whole_sentences", "rouge2", "rouge1")
EACH = "LAMP on sentences of CoLA, sentence by sentence"
MEANS = "LAMP on sentences of CoLA, no defense"
BARE, NOISE = "the update", "noise in its place"
FIRST = 1000  # training sentence of the first update


@dataclass(frozen=True)
class Case:
    """One update."""

    batch: int
    number: int
    given: str = BARE

    @property
    def key(self) -> list[str]:
        """The cells that a row of it begins with."""
        return [str(self.batch), self.given, str(self.number)]

    @property
    def rows(self) -> list[int]:
        """The training sentences of its batch."""
        start = FIRST + 100 * self.batch + self.batch * self.number
        return list(range(start, start + self.batch))


CASES = (
    *(Case(1, number) for number in range(8)),
    *(Case(4, number) for number in range(2)),
    *(Case(1, number, NOISE) for number in range(2)),
)


def measure() -> Iterator[list[Table]]:
    torch.set_num_threads(1)
    encoder = os.environ.get("FEDVEIL_ENCODER", "")
    try:
        task = task_of(short_sentences(encoder, STORE), encoder, "not shared")
    except FedveilError as error:
        print(f"lamp is left out: {error}")
        return
    kept = {table.title: table for table in measured("lamp")}
    each = kept.get(EACH, Table(EACH, ["batch", "from", "update", "original", "found", *SHARES, "s per sentence"]))
    each.note = "Shares in %: of whole sentences, 100 is one that was found whole."
    attack, fitted = LAMP(), None
    for case in CASES:
        if case.key in [row[:3] for row in each.rows]:
            continue
        begun = time.perf_counter()
        scene, true = scene_of(task, case)
        if fitted is None:
            lab = Lab(scene.public, scene.updates, task.test, Streams.seeded(0, [0], "lab"))
            fitted = attack.fit(lab)
        found = attack.run(scene, fitted).inputs
        add(each, task, case, found, true, time.perf_counter() - begun)
        yield [means(each), each]


def scene_of(task: fv.Task, case: Case) -> tuple[Scene, Tensor]:
    """What an attacker has of one update, and the sentences behind it (1, B, places)."""
    kind, _ = modality_of(task).equipped(task, {})
    inputs, labels = task.train.batch(case.rows)
    assert isinstance(inputs, dict)
    params = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    slopes = torch.autograd.grad(task.loss(task.model.eval()(**inputs), labels), list(params.values()))
    updates = Updates(
        kind="gradient",
        before=Tree.expand({name: p.detach() for name, p in params.items()}, 1),
        message=Tree({name: slope[None] for name, slope in zip(params, slopes, strict=True)}),
        buffers=Tree.expand({}, 1),
        lr=(0.1,),
        batch_sizes=(case.batch,),
    )
    streams = Streams.seeded(case.number, [0], "lamp")
    if case.given == NOISE:
        updates = with_gradient(updates, noise_like(updates.gradient, streams.fold("floor")))
    true = tokens_of(inputs)[None]
    public = Public(task.model, task.loss, kind.layout(task.shape), task.classes, task.target)
    scene = Scene(public, updates, streams)
    return replace(scene, labels=labels[None], lengths=(true != NO_TOKEN).sum(-1)), true


def add(table: Table, task: fv.Task, case: Case, found: Tensor, true: Tensor, seconds: float) -> None:
    """A row for each sentence."""
    assert task.text is not None
    matched = arranged(task.text, found, true)[0][0]
    values = compared(task.text, matched, true[0])
    for place, (mine, own) in enumerate(zip(matched, true[0], strict=True)):
        shares = [f"{100 * float(values[name][place]):.0f}" for name in SHARES]
        told = task.text.text(own), task.text.text(mine)
        table.add(*case.key, *told, *shares, f"{seconds / case.batch:.0f}")
        print(table.rows[-1], flush=True)


def means(each: Table) -> Table:
    """What all sentences come to."""
    table = Table(
        MEANS,
        ["batch", "from", "sentences", "whole sentences", "ROUGE-2", "ROUGE-1", "s per sentence"],
        f"Sentences of {TOKENS[0]} to {TOKENS[-1]} tokens that no attack was tuned on, {ENCODER}; embeddings' "
        "gradients are not shared. Means in %, with 95 % intervals. `lamp` as it is (500 steps, n-gram model of "
        "held-out sentences of CoLA), which is told labels and lengths. From noise in place of the update: what the "
        "language prior gets alone. Seconds are by the clock, mostly of a process that had a seventh of a core: "
        "batches of one took about 150 s of processor time for a sentence.",
    )
    for batch, given in dict.fromkeys((row[0], row[1]) for row in each.rows):
        rows = [row for row in each.rows if row[:2] == [batch, given]]
        columns = [_mean(rows, 5 + place, share=not place) for place in range(3)]
        seconds = sum(float(row[-1]) for row in rows) / len(rows)
        table.add(batch, given, len(rows), *columns, f"{seconds:.0f}")
    return table


def _mean(rows: Sequence[Sequence[str]], column: int, *, share: bool) -> str:
    """Sentences of one update stand or fall together."""
    found = bootstrap([float(row[column]) / 100 for row in rows], groups=[row[2] for row in rows], share=share)
    return f"{100 * found.mean:.1f} [{100 * found.low:.0f}, {100 * found.high:.0f}]"
