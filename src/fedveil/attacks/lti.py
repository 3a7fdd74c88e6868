"""LTI, Learning to Invert (Wu et al. 2023): a network from updates to pictures, trained on auxiliary data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedveil.attacks.bank import ROWS, Bank, made
from fedveil.attacks.base import Attack, Work
from fedveil.attacks.features import Features
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.inverter import Inverter, mean_pictures
from fedveil.attacks.lab import Lab
from fedveil.attacks.labels import last_linear
from fedveil.attacks.learned_linear import recovered_labels
from fedveil.attacks.matched import matched_error
from fedveil.attacks.networks import Course, Weights, trained
from fedveil.attacks.practice import Batches, Practice, pictures, practice_seconds
from fedveil.attacks.scene import Public, Scene
from fedveil.attacks.sketch import Sketch
from fedveil.errors import FedveilError
from fedveil.fields import Count, Positive, declared
from fedveil.registry import attacks
from fedveil.streams import Streams

OPERATIONS = 4e10  # per second of one core, in products of the sizes that occur here
_NETWORK = "network."


@attacks.register("lti")
@declared
class LTI(Attack):
    """Train a network from updates to pictures on auxiliary data under the defense, and apply it to the update.

    The attacker plays client: it makes the updates of auxiliary batches under the defense that it knows, with fresh
    noise at every step, and trains a network of two hidden layers to tell the pictures. In a batch, each picture counts
    against its partner under the best assignment. The weights with the least error on auxiliary pictures that are held
    out are kept; no victim is seen. Applying the network takes no time.

    Our reading: updates are taken in their principal directions; one picture is asked for at a time, by its label and
    by its number among those of the label, and these also gate the first layer, which has a linear way round the
    others; the network adds to the mean picture of the label. On MNIST and `lenet` this reaches 22 dB where plain
    layers on hashed entries, told the labels too, come to 19.5 after as many steps of that width. `published` is the
    network of the paper, which is told no labels.

    Works on any model, and under any defense that can be replayed. It does not get exact, however exact the update is.
    Takes about two minutes of one core on `lenet`, twice that under noise, and more for batches.
    """

    paper = "Wu, Chen, Guo, Weinberger, Learning to Invert: Simple Adaptive Attacks for Gradient Inversion, UAI 2023"
    question = "reconstruct"
    revision = 1
    width: Count = 768  # of the two hidden layers
    steps: Count = 2000  # of Adam
    at_once: Count = 128  # batches that one step learns from
    lr: Positive = 1e-3  # Adam's rate at the start
    most: Count = 12_000  # auxiliary pictures to train on
    bins: Count = 2**13  # numbers that an update is hashed into if it has more entries
    directions: Count = 1024  # principal directions of these that the network gets
    labels: Literal["known", "recovered", "none"] = "known"  # told, read off the update, or not used
    plain: bool = False  # the published network: hashed entries, no labels, nothing but layers

    @classmethod
    def published(cls) -> LTI:
        """As published for LeNet on CIFAR-10: 50,000 auxiliary pictures, 200 epochs, labels not used."""
        return cls(width=3000, steps=39_000, at_once=256, lr=1e-4, most=50_000, labels="none", plain=True)

    @property
    def needs(self) -> frozenset[str]:
        """Auxiliary data, and the labels where they are told."""
        more = {"known": {"labels", "classes"}, "recovered": {"classes"}, "none": set[str]()}
        return frozenset({"auxiliary"} | more[self.labels])

    @property
    def labels_from(self) -> str | None:
        """As the field says."""
        return None if self.labels == "none" else self.labels

    def check(self, scene: Scene) -> None:
        """Refuse a model that labels cannot be read off, if they are to be."""
        if self.labels == "recovered":
            last_linear(scene.public.model, scene.public.classes)

    def fit(self, lab: Lab) -> dict[str, Tensor]:
        """The trained network, the map from updates to what it takes, and mean pictures."""
        size, classes = lab.model.examples, lab.public.classes or 0
        train, held_out = pictures(lab, self.most, self.name)
        streams = lab.streams.fold(self.name)
        sketch = Sketch.of(lab.model.before, self.bins)
        practice = Practice(lab, size, train)
        directions = 0 if self.plain else self.directions
        bank = Bank.of(practice, train, sketch, self.most, directions, streams.fold("train"))
        judged = held_out.drawn(max(1, len(held_out) // size), size, streams.fold("judged"))
        seen = made(practice.sent, judged, streams.fold("seen"), bank.features)
        network = self._network(size, lab.public)
        means = mean_pictures(train, classes)
        weights = network.drawn(bank.features.size, means.shape[1], self.width, streams.fold("weights"))

        def error(weights: Weights, rows: Tensor, batches: Batches) -> Tensor:
            ordered = batches.sorted() if network.classes else batches
            found = network(weights, rows, ordered.labels, means)
            both = (ordered.labels, ordered.labels) if network.classes else None
            return matched_error(found, ordered.inputs.flatten(2).float(), both).mean()

        lessons = Streams.seeded(int(streams.fold("lessons").key64()), range(self.at_once + 1))
        course = Course(
            loss=lambda weights: error(weights, *bank.lesson(self.at_once, lessons)),
            held_out=lambda weights: float(error(weights, seen, judged)),
            steps=self.steps,
            lr=self.lr,
            decay="step" if self.plain else "cosine",
            report=lab.report,
        )
        found = trained(weights, course)
        return {**bank.features.tensors(), "means": means, **{_NETWORK + name: t for name, t in found.items()}}

    def estimate(self, scene: Scene) -> Work:
        """A step for all victims. Nearly all of the time goes into training."""
        size = min(self.bins, scene.updates.message.size)
        inside = size if self.plain else min(size, self.directions)
        pixels = scene.like.new_zeros(scene.public.layout.shape).numel()
        network = inside * self.width + scene.batch_size * self.width * (self.width + 2 * pixels)
        noisy = size * inside if scene.chain.defenses and not self.plain else 0
        each = self.at_once * (6 * network + 2 * noisy)
        rows = 0 if self.plain else ROWS * self.directions
        finding = 2 * rows**2 * size + 10 * rows**3
        learning = (self.steps * each + finding) / OPERATIONS + practice_seconds(scene, self.most)
        return Work(1, 0.0, learning)

    def run(self, scene: Scene, fitted: Mapping[str, Tensor] | None = None) -> Reconstruction:
        """Apply the network to the update of every victim."""
        if fitted is None:
            raise FedveilError(f"{self.name} learns from auxiliary pictures: give it what its `fit` returned")
        begun = time.perf_counter()
        features = Features.read(Sketch.of(scene.updates.before, self.bins), fitted)
        weights = {name.removeprefix(_NETWORK): t for name, t in fitted.items() if name.startswith(_NETWORK)}
        box, shape = scene.public.layout.box, scene.public.layout.shape
        network = self._network(scene.batch_size, scene.public)
        labels = self._labels(scene).cpu()
        order = labels.argsort(dim=1, stable=True)
        found = []
        for victim in range(scene.count):  # one by one: products of larger matrices differ in their last bits
            rows, asked = features(scene.updates.gradient.rows([victim])), labels[victim][order[victim]]
            found.append(network(weights, rows, asked[None], fitted["means"]))
        inputs = torch.cat(found)
        inputs = torch.zeros_like(inputs).scatter(1, order[..., None].expand_as(inputs), inputs)
        if self.labels == "none":
            labels = torch.cdist(inputs, fitted["means"][None].expand(len(inputs), -1, -1)).argmin(2)
        inputs = inputs.reshape(scene.count, scene.batch_size, *shape).to(scene.like)
        if box is not None:
            inputs = inputs.clamp(*(bound.to(inputs) for bound in box))
        if scene.bench.report is not None:
            scene.bench.report(1, 1)
        cost = torch.full((scene.count,), torch.nan).to(inputs)
        return Reconstruction(inputs, labels.to(inputs.device), cost, time.perf_counter() - begun)

    def _network(self, size: int, public: Public) -> Inverter:
        classes = 0 if self.labels == "none" else public.classes or 0
        return Inverter(self.plain, size, classes, public.layout.box)

    def _labels(self, scene: Scene) -> Tensor:
        """The labels of every victim: (V, B); zeros where they are not used."""
        if self.labels == "none":
            return torch.zeros(scene.count, scene.batch_size, dtype=torch.int64)
        if self.labels == "recovered":
            return torch.cat([recovered_labels(scene.rows([victim])) for victim in range(scene.count)])
        if scene.labels is None:
            raise FedveilError("the labels are not known here: let the attack read them off (--labels recovered)")
        return scene.labels
