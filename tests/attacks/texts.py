"""Tasks of text that need no files of others: made-up sentences and a small transformer."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

import fedveil as fv
from fedveil.attacks.scene import Public, Scene
from fedveil.defenses.updates import Updates
from fedveil.leakage.modalities import modality_of
from fedveil.streams import Streams
from fedveil.tasks.text_form import tokens_of
from fedveil.tree import Tree

SUBJECTS = ("the river", "a stone", "every light of the old town", "paper", "no one", "the boat that left")
VERBS = ("sank", "was rebuilt", "sang and sang again", "fell", "rose", "burned through the night")
ENDS = ("today", "slowly", "at last", "in may")
LENGTH = 16


def sentence_file(folder: Path) -> Path:
    """Sentences with two classes, a line each."""
    lines = [f"{subject} {verb} {end}" for subject in SUBJECTS for verb in VERBS for end in ENDS]
    random.Random(0).shuffle(lines)
    path = folder / "sentences.tsv"
    path.write_text("".join(f"{line}\t{'ab'[number % 2]}\n" for number, line in enumerate(lines)), encoding="utf-8")
    return path


def text_task(folder: Path, model: str = "tiny-transformer:width=48", **more: object) -> fv.Task:
    """Sentences with classes for a small transformer."""
    name = f"sentences:path={sentence_file(folder)},length={LENGTH},vocabulary=300"
    return fv.task(name, model=model, clients=2, **more)  # type: ignore[arg-type]


def running_task(folder: Path) -> fv.Task:
    """The same as running text, each next token of which is predicted."""
    path = folder / "running.txt"
    path.write_text(sentence_file(folder).read_text(encoding="utf-8").replace("\t", " "), encoding="utf-8")
    return fv.task(f"text:path={path},length=10,vocabulary=300", model="tiny-transformer:width=64", clients=2)


def text_scene(task: fv.Task, batches: list[list[int]], noise: float = 0.0) -> tuple[Scene, Tensor]:
    """What an attacker has of the gradients of some batches of the training part, and their tokens (V, B, places)."""
    kind, _ = modality_of(task).equipped(task, {})
    public = Public(task.model, task.loss, kind.layout(task.shape), task.classes, task.target)
    params = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    tokens, sent = [], []
    random_numbers = torch.Generator().manual_seed(0)
    for rows in batches:
        inputs, labels = task.train.batch(rows)
        assert isinstance(inputs, dict)
        found = torch.autograd.grad(task.loss(task.model(**inputs), labels), list(params.values()))
        noisy = [each + noise * torch.randn(each.shape, generator=random_numbers) for each in found]
        sent.append(dict(zip(params, noisy, strict=True)))
        tokens.append(tokens_of(inputs))
    count, size = len(batches), len(batches[0])
    updates = Updates(
        kind="gradient",
        before=Tree.expand({name: p.detach() for name, p in params.items()}, count),
        message=Tree({name: torch.stack([each[name] for each in sent]) for name in params}),
        buffers=Tree.expand({}, count),
        lr=(0.1,),
        batch_sizes=(size,),
    )
    return Scene(public, updates, Streams.seeded(0, range(count), "test")), torch.stack(tokens)


def same_sentences(found: Tensor, true: Tensor) -> float:
    """The share of the sentences (V, B, places) that were found, whatever their order in a batch."""
    shares = []
    for mine, theirs in zip(found, true, strict=True):
        got = {tuple(row.tolist()) for row in mine}
        shares += [tuple(row.tolist()) in got for row in theirs]
    return sum(shares) / len(shares)
