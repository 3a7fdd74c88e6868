"""The learned linear attack: a linear map from updates to pictures, learned from auxiliary data under the defense."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.lab import Lab
from fedveil.attacks.labels import last_linear, recover_labels
from fedveil.attacks.problem import Problem
from fedveil.attacks.replay import Replay
from fedveil.attacks.ridge import Ridge, Rows
from fedveil.attacks.scene import Scene
from fedveil.attacks.sketch import Sketch
from fedveil.attacks.without_dropout import dropout_off, without_dropout
from fedveil.clients.choose import gradient_seconds
from fedveil.defenses.base import owns_step, step_weight
from fedveil.defenses.chain import Chain
from fedveil.defenses.likelihood import Reading, reading
from fedveil.defenses.updates import Updates, as_gradient
from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import attacks
from fedveil.streams import Streams
from fedveil.tree import Tree

MATRICES = 1e11  # operations per second of one core in products of large matrices
PIECES = 4  # parts that the victims are shared out in: those of equal labels in one part share the learning
MOST_BYTES = 2**27  # of auxiliary pictures that are kept
DIRECTIONS = 64  # along which errors on pictures that were left out are measured
STRANGERS = 0.1  # weight of pictures of other classes; anything from 0.03 to 0.3 is as good on MNIST
FLOOR = 1e-3  # the least noise of an entry, in parts of the mean noise of its tensor
PRECISE = 1e-2  # the least noise of an entry, in parts of the mean signal of its tensor


@attacks.register("learned-linear")
@declared
class LearnedLinear(Attack):
    """Learn a linear map from updates to pictures on auxiliary data, and apply it to the update.

    The attacker plays client: it takes auxiliary pictures of the labels behind an update, makes their updates under
    the defense it knows, with random numbers of its own, and fits a ridge regression from these to the pixels. Pictures
    of other classes, given those labels, count a little. Where the defense adds noise, the regression is also fitted
    to updates before the noise, whose size then decides how much each entry is trusted: this is as good as averaging
    over endless draws. Penalty and variant are chosen by the errors on auxiliary pictures left out.

    Works where the update is nearly linear in the picture, as for `lenet` before training, and needs no optimization.
    It is strong where little of each entry is left (signs, the largest 1 %, noise), and on batches, whose labels tell
    their pictures apart. It does not get exact, however exact the update is. Pictures with the same label in a batch
    are told apart by their order along the main direction of their class alone, and come out blurred together.

    Of several messages about one batch the mean is learned from, and attacked.

    A FedAvg update is learned from whole local rounds, whose examples are taken in the order of the labels.
    """

    paper = "a linear form of Wu et al., Learning to Invert: Simple Adaptive Attacks for Gradient Inversion, UAI 2023"
    modalities = ("pictures", "records")
    question = "reconstruct"
    revision = 2
    most: Count = 1400  # auxiliary batches to learn from for one set of labels
    bins: Count = 2**14  # numbers that an update is hashed into if it has more entries
    labels: Literal["known", "recovered"] = "known"  # told, or read off the update

    @property
    def needs(self) -> frozenset[str]:
        """Auxiliary data, and the labels where they are not read off."""
        return frozenset({"auxiliary", "labels"} if self.labels == "known" else {"auxiliary"})

    @property
    def labels_from(self) -> str:
        """As the field says."""
        return self.labels

    def check(self, scene: Scene) -> None:
        """Refuse a model that labels cannot be read off, if they are to be."""
        if self.labels == "recovered":
            last_linear(scene.public.model, scene.public.classes)

    def fit(self, lab: Lab) -> dict[str, Tensor]:
        """The auxiliary pictures. Which are learned from depends on the labels of a victim, so `run` learns."""
        if lab.auxiliary is None or not len(lab.auxiliary):
            raise FedveilError(f"{self.name} learns from auxiliary pictures, and there are none: use another attack")
        size = lab.auxiliary.batch([0])[0]
        assert isinstance(size, Tensor)  # pictures are
        room = max(1, MOST_BYTES // (size.numel() * size.element_size()))
        rows = range(0, len(lab.auxiliary), -(-len(lab.auxiliary) // room))
        inputs, labels = lab.auxiliary.batch(rows)
        assert isinstance(inputs, Tensor)
        return {"inputs": inputs, "labels": labels, "key": lab.streams.fold(self.name).key64()}

    def estimate(self, scene: Scene) -> Work:
        """A step for every victim. Those with equal labels are learned for together."""
        groups = scene.count if scene.batch_size > 1 else min(scene.count, scene.public.classes or scene.count)
        rows, size = self.most, min(self.bins, scene.updates.message.size)
        sample = scene.like.new_zeros(scene.batch_size, *scene.public.layout.shape), torch.zeros(1)
        variants = 2 if any(defense.random for defense in scene.chain.defenses) else 1
        gradients = gradient_seconds(scene.public.model, sample, rows * scene.updates.steps)
        kernel = (2 * rows**2 * size + 10 * rows**3) / MATRICES
        return Work(scene.count, groups * variants * (gradients + kernel))

    def pieces(self, scene: Scene) -> list[Scene]:
        """A few parts: what is learned for some labels does not depend on the victims that have them."""
        step = -(-scene.count // PIECES)
        return [scene.rows(slice(start, start + step)) for start in range(0, scene.count, step)]

    def run(self, scene: Scene, fitted: Mapping[str, Tensor] | None = None) -> Reconstruction:
        """Learn for each set of labels among the victims, and apply what was learned."""
        if fitted is None:
            raise FedveilError(f"{self.name} learns from auxiliary pictures: give it what its `fit` returned")
        begun, done = time.perf_counter(), 0
        labels = self._labels(scene)
        shape = (scene.count, scene.batch_size, *scene.public.layout.shape)
        inputs = torch.empty(shape, dtype=scene.like.dtype, device=scene.like.device)
        for members in _alike(scene.updates, labels):
            student = Student.taught(self, scene.rows(members[:1]), labels[members[0]], fitted)
            for victim in members:
                inputs[victim] = student.batch(scene.updates.rows([victim])).reshape(shape[1:]).to(inputs)
                done += 1
                if scene.bench.report is not None:
                    scene.bench.report(done, scene.count)
        if scene.public.layout.box is not None:
            low, high = (bound.to(inputs) for bound in scene.public.layout.box)
            inputs = inputs.clamp(low, high)
        inputs = scene.public.layout.settled(inputs)
        cost = torch.full((scene.count,), torch.nan).to(inputs)
        return Reconstruction(inputs, labels, cost, time.perf_counter() - begun)

    def _labels(self, scene: Scene) -> Tensor:
        """The labels of every victim: (V, B)."""
        if self.labels == "recovered":
            return torch.cat([recovered_labels(scene.rows([victim])) for victim in range(scene.count)])
        if scene.labels is None:
            raise FedveilError("the labels are not known here: let the attack read them off (--labels recovered)")
        return scene.labels


def recovered_labels(scene: Scene) -> Tensor:
    """The labels of one victim, as its own update and random numbers tell them."""
    problem = Problem.of(scene)
    problem = replace(problem, model=without_dropout(problem.model))
    with dropout_off(problem):
        return recover_labels(problem)


def _alike(updates: Updates, labels: Tensor) -> list[list[int]]:
    """Victims that one student serves: those with the same labels, in order, at the same model."""
    if not updates.before.repeated:
        return [[victim] for victim in range(updates.count)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for victim, own in enumerate(labels.tolist()):
        groups.setdefault(tuple(own), []).append(victim)
    return list(groups.values())


# ---- what is learned from -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lessons:
    """Auxiliary batches (n, B, ...) for some labels. Those whose pictures have these labels count fully."""

    inputs: Tensor
    weight: Tensor  # (n,)

    @classmethod
    def draw(cls, fitted: Mapping[str, Tensor], labels: Tensor, most: int, streams: Streams) -> Self:
        """At most so many batches for the labels (B,).

        Single pictures are those of the label, then those of other classes, which will be given the label. Of batches
        there are enough without. Where there is no auxiliary picture of a label, all of them stand in.
        """
        pictures, known = fitted["inputs"], fitted["labels"]
        found = {label: (known == label).nonzero().flatten() for label in labels.tolist()}
        pools = {label: rows if len(rows) else torch.arange(len(known)) for label, rows in found.items()}
        if len(labels) == 1:
            own = pools[int(labels)][:most]
            rest = torch.arange(len(known))[~torch.isin(torch.arange(len(known)), pools[int(labels)])]
            strange = rest[streams.permutation(len(rest))[0, : most - len(own)]]
            weight = torch.cat([torch.ones(len(own)), torch.full((len(strange),), STRANGERS)])
            return cls(pictures[torch.cat([own, strange])][:, None], weight)
        slots = [(pools[label], streams.fold("slot", slot)) for slot, label in enumerate(labels.tolist())]
        inputs = pictures[torch.stack([pool[draw.integers(len(pool), most)[0]] for pool, draw in slots], 1)]
        for label, pool in pools.items():
            alike = (labels == label).nonzero().flatten()
            if len(alike) > 1:
                inputs[:, alike] = _in_order(inputs[:, alike], pictures[pool[:most]])
        return cls(inputs, torch.ones(most))

    @property
    def own(self) -> Tensor:
        """Which of them have the labels: (n,)."""
        return self.weight == 1


def _in_order(inputs: Tensor, pool: Tensor) -> Tensor:
    """Pictures (n, m, ...) of one class, those of each batch in their order along the main direction of the class.

    An update does not tell the order of its examples. Without one, all of a class would be predicted as their mean.
    """
    centered = (pool - pool.mean(0)).flatten(1).double()
    vectors = torch.linalg.eigh(centered @ centered.T).eigenvectors
    main = (centered.T @ vectors[:, -1]).to(inputs)
    order = (inputs.flatten(2) @ main).argsort(dim=1, stable=True)
    return inputs[torch.arange(len(inputs))[:, None], order]


@dataclass(frozen=True, eq=False)
class Play:
    """The attacker in the part of clients who hold auxiliary batches."""

    scene: Scene  # of one victim, for its model and the form of its update
    inputs: Tensor  # (n, B, ...)
    labels: Tensor  # (B,)
    sketch: Sketch
    streams: Streams  # one for each client

    def sent(self) -> Tensor:
        """What they would send under the known defense, as features: (n, d).

        Where the victim's messages are several, the mean of as many.
        """
        how = reading(self.scene.chain, self.scene.updates)
        hidden = [each for each in self.scene.chain.defenses if owns_step(each) and "validation" in each.needs]
        replayed = Chain(tuple(each for each in self.scene.chain.defenses if each not in hidden))
        how = replace(how, rule="cosine", replayed=replayed, judge=None, of_step=False)
        views = len(self.scene.seen) if any(each.random for each in replayed.defenses) else 1
        total = self._features(how)
        for view in range(1, views):
            total += self._features(how, "view", view)
        return total / views if views > 1 else total

    def expected(self) -> Tensor | None:
        """The same before the last thing that is random; None if nothing random is done to an update."""
        how = reading(self.scene.chain, self.scene.updates)
        return self._features(how) if how.rule in ("density", "informed") else None

    def _features(self, how: Reading, *path: str | int) -> Tensor:
        like = self.scene.updates
        inputs = self.inputs.to(self.scene.like)
        labels = self.labels.expand(len(inputs), -1).to(inputs.device)
        replay = Replay(self.scene.public, like, (inputs[0], labels[0]), self.scene.bench.backend)
        streams, step = self.streams.fold("client", *path), replay.at_once(how.replayed)
        found = torch.empty(len(inputs), self.sketch.size)
        for number, first in enumerate(how.histories):  # which one it was is not known: an equal share of each
            rows = torch.arange(number, len(inputs), len(how.histories))
            for part in torch.split(rows, step):
                given = how.replayed, inputs[part], labels[part], streams.rows(part)
                if how.bare or how.of_step:
                    made = replay.gradients(*given, first, bare=how.bare)
                else:
                    before = Tree.expand(like.before.row(0), len(part))
                    weight = step_weight(like.lr, like.momentum)
                    made = as_gradient(like.kind, replay.messages(*given, first), before, weight)
                found[part] = self.sketch.rows(made)
        return found


# ---- learning -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lens:
    """Features as a regression takes them: around a center, every entry in a unit of its own."""

    center: Tensor  # (d,)
    factor: Tensor  # (d,)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows (n, d) of features."""
        return (rows - self.center) * self.factor


@dataclass(frozen=True, eq=False)
class Student:
    """What was learned for some labels at one model."""

    ridge: Ridge
    lens: Lens  # for what is observed
    mean: Tensor  # (B·pixels,): the mean batch, around which pictures are predicted
    sketch: Sketch

    @classmethod
    def taught(cls, attack: LearnedLinear, scene: Scene, labels: Tensor, fitted: Mapping[str, Tensor]) -> Self:
        """Learn for the labels (B,) at the model of one victim. Its update is not looked at."""
        labels, key = labels.cpu(), int(fitted["key"])
        choice = Streams.seeded(key, [0], "choice", *labels.tolist())
        lessons = Lessons.draw(fitted, labels, attack.most, choice)
        clients = Streams.seeded(key, range(len(lessons.inputs)), "clients", *labels.tolist())
        sketch = Sketch.of(scene.updates.before, attack.bins)
        play = Play(scene, lessons.inputs, labels, sketch, clients)
        wanted = lessons.inputs.flatten(1).float()
        mean = wanted[lessons.own].mean(0)
        few = wanted.shape[1] <= DIRECTIONS
        directions = None if few else choice.fold("directions").normal(wanted.shape[1], DIRECTIONS)[0]
        best: Self | None = None
        for learned, observed, lens in _variants(play, lessons.own):
            rows = Rows(learned, observed, wanted - mean, lessons.weight, lessons.own)
            ridge = Ridge.fit(rows, directions)
            if best is None or ridge.error < best.ridge.error:
                best = cls(ridge, lens, mean, sketch)
        assert best is not None
        return best

    def batch(self, updates: Updates) -> Tensor:
        """The pixels behind the update of one victim: (B·pixels,)."""
        return self.ridge.predict(self.lens(self.sketch.rows(updates.gradient))[0]) + self.mean


def _variants(play: Play, own: Tensor) -> Iterator[tuple[Tensor, Tensor, Lens]]:
    """Features to learn from, the same as they will be observed, and how to look at these."""
    means, sent = play.sketch.means, play.sent()
    center = sent[own].mean(0)
    lens = Lens(center, _inverse(means((sent[own] - center).square().mean(0)).sqrt()))
    seen = lens(sent)
    yield seen, seen, lens
    expected = play.expected()
    if expected is None:
        return
    # Sent = slope·expected + noise. Endless draws of the noise would amount to a penalty of its variance.
    about, around = sent - sent.mean(0), expected - expected.mean(0)
    signal = means(around.square().mean(0))
    slope = means((about * around).mean(0)) * _inverse(signal)
    noise = (about - slope * around).square().mean(0)
    unit = _inverse((noise + FLOOR * means(noise) + PRECISE * slope.square() * signal).sqrt())
    lens = Lens(center, unit)
    yield Lens(expected[own].mean(0), slope * unit)(expected), lens(sent), lens


def _inverse(values: Tensor) -> Tensor:
    """1/values, and 0 where they are 0: what never varies tells nothing."""
    return torch.where(values > 0, 1 / values, 0.0)
