"""What the attacked updates are, what the attacker knows of them, and what was true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.problem import LocalSteps
from fedveil.auditing.asked import Asked
from fedveil.auditing.attacking import Scene
from fedveil.auditing.scoring import Truths
from fedveil.auditing.settings import Audit
from fedveil.defenses.base import Facts
from fedveil.errors import FedveilError
from fedveil.federation.probe import Probe, Victims, probe
from fedveil.federation.run import Run
from fedveil.federation.steps import Prepared
from fedveil.leakage.floors import mean_image
from fedveil.leakage.identified import candidates
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.task import Task


@dataclass(frozen=True, eq=False)
class Observed:
    """What the victims of one round share."""

    round: int
    probe: Probe


def reached(asked: Asked, run: Run | None) -> tuple[Asked, list[str]]:
    """The rounds that can be attacked after training, and a line on each that cannot.

    Early stopping may end a run before an attacked round, and a round's recorded update may have been refused. Where
    none of the rounds is left, the model that the run kept is attacked, which the round after its own starts from:
    nothing that was trained is lost.
    """
    wanted = asked.settings.rounds
    recorded = {1, *(each.round for each in run.captured)} if run else set(wanted)
    there = [number for number in wanted if number in recorded]
    if run is None or there == list(wanted):
        return asked, []
    last = len(run.history)
    ended = f"early stopping ended the training after round {last}"
    lines = [
        f"round {number}: {ended if number > last else 'its recorded update was refused'}"
        for number in wanted
        if number not in recorded
    ]
    if there:
        return asked.with_rounds(there), lines
    after = run.chosen_round + 1
    if asked.chain.defenses and after <= asked.federation.warmup_rounds:
        raise FedveilError(
            f"{ended}, in the warm-up without the defense: no round after it can be attacked; use a greater patience "
            "or fewer warm-up rounds"
        )
    lines.append(f"in place of these, the model that training kept is attacked, which round {after} starts from")
    return asked.with_rounds([after]), lines


def observe(asked: Asked, number: int, run: Run | None, prepared: Prepared) -> Observed:
    """What the victims share at the start of a round."""
    task, settings = asked.task, asked.settings
    params = {name: p.detach() for name, p in task.model.named_parameters() if p.requires_grad}
    buffers: dict[str, Tensor] = {name: b.detach() for name, b in task.model.named_buffers()}
    if number > 1:
        assert run is not None
        recorded = next((each for each in run.captured if each.round == number), None)
        if recorded is not None:
            capture = recorded.capture
            params, buffers = dict(capture.before), dict(capture.buffers_before or buffers)
        else:  # see `reached`
            assert number == run.chosen_round + 1
            params, buffers = run.params, buffers if task.buffers == "local" else run.buffers
    victims = Victims(settings.victims, settings.batch_size, settings.source)
    found = probe(prepared, params, buffers, number, victims)
    return Observed(number, found)


def scene(asked: Asked, observed: Observed, normalization: Normalization, attack: Attack) -> Scene:
    """What the attacker knows of the updates of a round."""
    task, federation, found = asked.task, asked.federation, observed.probe.defended
    victims, size = observed.probe.truth.targets.shape
    local = None
    if federation.protocol == "fedavg" and asked.settings.local_steps == "unrolled":
        local = LocalSteps(
            steps=found.steps,
            batch_size=min(federation.batch_size, size),
            lr=found.lr[0],
            momentum=found.momentum,
            weight_decay=found.weight_decay,
        )
    return Scene(
        model=task.model,
        loss=task.loss,
        params=found.before,
        buffers=found.buffers,
        shape=task.shape,
        batch_size=size,
        classes=task.classes,
        normalization=normalization,
        facts=Facts(kind=found.kind, batch_size=size, steps=found.steps, lr=found.lr[0], momentum=found.momentum),
        streams=Streams.seeded(asked.seed, range(victims), "attack", observed.round),
        labels=observed.probe.truth.targets if attack.choices().labels == "known" else None,
        local=local,
    )


def truths(asked: Asked, observed: list[Observed], normalization: Normalization) -> Truths:
    """What the victims really had, and held-out images to tell theirs from."""
    probes = [each.probe.truth for each in observed]
    originals = torch.cat([_tensor(found.inputs) for found in probes])
    labels = torch.cat([found.targets for found in probes])
    pool = _held_out(asked.task, asked.settings)
    images, classes = pool.batch(list(range(len(pool))))
    flat = originals.flatten(0, 1)
    count = asked.settings.candidates
    chosen = candidates(flat, labels.flatten(), _tensor(images), classes, count=count, seed=asked.seed)
    return Truths(
        originals=originals,
        labels=labels,
        seen=torch.cat([_tensor(found.seen) for found in probes]),
        distractors=_tensor(images)[chosen],
        mean_image=_mean_image(asked.task.train),
        normalization=normalization,
        rounds=tuple(each.round for each in observed for _ in range(len(each.probe.truth.targets))),
    )


def _held_out(task: Task, settings: Audit, most: int = 20_000) -> Examples:
    """Images that no victim holds: the test examples, less those that are victims themselves."""
    taken = settings.victims * settings.batch_size if settings.source == "test" else 0
    return task.test.subset(list(range(taken, min(len(task.test), taken + most))))


def _mean_image(train: Examples) -> Tensor:
    """The mean over all training images, read a part at a time."""
    # One part in memory at a time: a large data set need not fit.
    means = torch.stack([mean_image(_tensor(inputs)).double() * len(labels) for inputs, labels in train.batches(4096)])
    return (means.sum(0) / len(train)).to(torch.get_default_dtype())


def _tensor(inputs: Any) -> Tensor:
    """The images in single precision, in which they are judged whatever the model's own type is."""
    assert isinstance(inputs, Tensor)  # `check` admits images only
    return inputs.float()
