"""Mjölnir (Liu et al. 2025): take the noise off a gradient by a diffusion model of gradients, then invert it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedveil.attacks.bank import made
from fedveil.attacks.base import Work
from fedveil.attacks.denoiser import Denoiser, unit_of
from fedveil.attacks.diffusion import Diffusion
from fedveil.attacks.dlg import DLG
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.informed import Tries, Try
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.lab import Lab
from fedveil.attacks.matcher import match
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.networks import Course, Weights, trained
from fedveil.attacks.noise_level import linear_layers, most_rank, noise_beyond_rank
from fedveil.attacks.practice import Batches, Practice, pictures, practice_seconds
from fedveil.attacks.principal import Principal
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import LabelsFrom, Recipe
from fedveil.attacks.scene import Scene
from fedveil.defenses.base import Knowledge, trusting
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.fields import Count, NonNegative, Positive, RepeatsOrZero, declared
from fedveil.registry import attacks
from fedveil.streams import Streams
from fedveil.tree import Tree

OPERATIONS = 4e10  # per second of one core, in products of the sizes that occur here
MOST_BYTES = 2**29  # of gradients that principal directions are found by, and of these directions
ROWS = 2  # gradients that one principal direction is found by
FILLED = 30  # times that entries which are not trusted are filled in by the others
TRIED = 64  # held-out batches that the noise of a known defense is measured on
BEYOND = 2  # who knows the defense trains on steps up to so many times the one that its noise starts at


@attacks.register("mjolnir")
@declared
class Mjolnir(GradientMatching):
    """Mjölnir: take the noise off the update by a diffusion model of clean gradients, then invert what is left.

    The model is trained on the gradients of auxiliary batches, 1000 steps, β from 1e-4 to 0.02. The way back starts at
    the step that has as much noise as the update, and goes on step by step to the gradient, which is inverted as by
    `inverting-gradients` or `dlg`. The code of the paper applies every step to the noisy update itself and keeps the
    last, which takes off the noise of one step alone; here they are chained.

    The naive attacker reads the noise off the update: the gradient of a linear layer has no greater rank than the batch
    has examples, and what is beyond is noise. Where there is no such layer, it is what lies outside the directions in
    which gradients differ. Without noise nothing is done, and the attack is its inversion. Who knows the defense fills
    in the entries that are not to be trusted from the others, measures on auxiliary batches how much noise is left
    then, and trains the model for that.

    Our reading: the model works on the gradient along its principal directions, not on a square picture of its entries
    in a U-Net; along the others, gradients count as Gaussian. Of a large model there is room for fewer directions.
    Without `noise` every step takes its mean, which is nearer to the gradient than a draw. Takes about a minute of one
    core to train for `lenet`, and then as long as the inversion.
    """

    paper = "Liu et al., Mjölnir: Breaking the Shield of Perturbation-Protected Gradients via Adaptive Diffusion, 2025"
    revision = 2
    most: Count = 10_000  # auxiliary pictures to train on
    directions: Count = 512  # principal directions of gradients that are modeled
    width: Count = 512  # of the network
    training: Count = 1500  # steps of Adam that the model is trained for
    at_once: Count = 256  # gradients that one of them learns from
    lr: Positive = 2e-3  # Adam's rate at the start, in training
    noise: bool = False  # a draw of the gradient, as published, and not the mean of such draws
    inversion: Literal["inverting-gradients", "dlg"] = "inverting-gradients"  # what is done with the gradient
    steps: Count = 1600  # of the inversion
    polish: RepeatsOrZero = 20  # steps of L-BFGS after these, as inverting-gradients makes them
    restarts: Count = 2  # tries of the inversion; the one with the lowest final cost wins
    total_variation: NonNegative = 1e-5  # weight of the prior that favors smooth pictures; of no use to dlg
    labels: LabelsFrom = "known"  # told, read off the update, or optimized with the pixels, as dlg always does

    @classmethod
    def published(cls) -> Mjolnir:
        """As published: noise in every step back, and 20 outer steps of DLG. Training: 20 epochs, 8 at a time.

        How many gradients that is, the paper does not say: 50,000 here.
        """
        epochs = 20 * 50_000 // 8
        return cls(most=50_000, training=epochs, at_once=8, lr=1e-4, noise=True, inversion="dlg", steps=20, restarts=1)

    def recipe(self) -> Recipe:
        """That of the inversion."""
        if self.inversion == "dlg":
            return DLG(steps=self.steps, restarts=self.restarts).recipe()
        return InvertingGradients(
            steps=self.steps,
            polish=self.polish,
            restarts=self.restarts,
            total_variation=self.total_variation,
            labels=self.labels,
        ).recipe()

    @property
    def needs(self) -> frozenset[str]:
        """Auxiliary data, and what the inversion needs."""
        return super().needs | {"auxiliary"}

    # ---- learning ------------------------------------------------------------------------------------------

    def fit(self, lab: Lab) -> dict[str, Tensor]:
        """A diffusion model of clean gradients, and the noise that a known defense leaves on them."""
        train, held_out = pictures(lab, self.most, self.name)
        streams, size = lab.streams.fold(self.name), lab.model.examples
        practice = Practice(replace(lab, chain=Chain()), size, train)
        batches = train.drawn(len(train), size, streams.fold("batches"))
        judged = held_out.drawn(max(2, len(held_out) // size), size, streams.fold("judged"))
        room = max(2, MOST_BYTES // (4 * practice.entries))
        some = min(ROWS * self.directions, len(batches), room)
        rows = made(practice.sent, batches.rows(slice(0, some)), streams.fold("made"), _flat)
        principal = Principal.of(rows, min(self.directions, room))

        def coordinates(tree: Tree) -> Tensor:
            return principal.coordinates(_flat(tree)) / unit_of(principal)

        gradients = made(practice.sent, batches, streams.fold("made"), coordinates)
        seen = made(practice.sent, judged, streams.fold("made"), coordinates)
        outside = made(practice.sent, judged, streams.fold("made"), lambda tree: _outside(principal, _flat(tree)))
        principal = replace(principal, rest=float(outside.mean()))
        denoiser = Denoiser(principal, unit_of(principal), Diffusion(), {})
        sigma = -1.0
        if lab.chain.defenses:
            sigma = _left(lab, denoiser, judged.rows(slice(0, TRIED)), streams.fold("left"))
        weights = self._trained(denoiser, gradients, seen, sigma, streams.fold("trained"), lab)
        return {
            **replace(denoiser, weights=weights).tensors(),
            "sigma": torch.tensor(sigma, dtype=torch.float64),  # below 0: not known
            "outside": outside.max().double(),
        }

    def _trained(
        self, denoiser: Denoiser, gradients: Tensor, seen: Tensor, sigma: float, streams: Streams, lab: Lab
    ) -> Weights:
        most = denoiser.diffusion.steps
        if sigma >= 0:
            most = max(1, min(most, BEYOND * denoiser.diffusion.start(sigma / denoiser.unit)))
        drawn, fixed = streams.fold("steps"), streams.fold("fixed")

        def at(count: int, source: Streams) -> tuple[Tensor, Tensor]:
            """Steps, the early ones more often: defenses add little noise. And noise for them."""
            steps = (source.uniform(count)[0].square() * most).long() + 1
            return steps.clamp(max=most), source.normal(count, gradients.shape[1])[0]

        def loss(weights: Weights) -> Tensor:
            index = drawn.integers(len(gradients), self.at_once)[0]
            return denoiser.error(weights, gradients[index], *at(self.at_once, drawn))

        judged_at = at(len(seen), fixed)
        course = Course(
            loss=loss,
            held_out=lambda weights: float(denoiser.error(weights, seen, *judged_at)),
            steps=self.training,
            lr=self.lr,
            report=lab.report,
        )
        return trained(denoiser.drawn(self.width, streams.fold("weights")), course)

    # ---- attacking -----------------------------------------------------------------------------------------

    def run(self, scene: Scene, fitted: Mapping[str, Tensor] | None = None) -> Reconstruction:
        """Take the noise off every victim's update, and invert what is left."""
        if fitted is None:
            raise FedveilError(f"{self.name} learns from auxiliary pictures: give it what its `fit` returned")
        target = self.denoised(scene, fitted)
        problem = Problem.of(scene)
        plain = trusting(target)
        problem = replace(problem, target=plain.target, weight=plain.weight, reweight=None)
        return match(problem, self.checked_recipe(), scene.bench)

    def denoised(self, scene: Scene, fitted: Mapping[str, Tensor]) -> Tree:
        """The update of every victim, as a gradient, without its noise."""
        denoiser = Denoiser.read(fitted, Diffusion())
        sigma = float(fitted["sigma"])
        rows = []
        for victim in range(scene.count):  # one by one: products of larger matrices differ in their last bits
            own = scene.rows([victim])
            gradient = own.updates.gradient
            if sigma >= 0:
                flat = filled(denoiser.principal, own.knowledge())
                level = sigma
            else:
                flat = _flat(gradient)
                level = estimated_noise(own, flat, denoiser.principal, float(fitted["outside"]))
            streams = own.streams.fold("denoise") if self.noise else None
            found, start = denoiser.denoised(flat, level, streams)
            untouched = sigma < 0 and start == 0
            rows.append(gradient if untouched else gradient.unflat(found.to(own.like)))
        return Tree.concat(rows)

    def estimate(self, scene: Scene) -> Work:
        """The inversion, and the training before it."""
        size, inside = scene.updates.message.size, min(self.directions, scene.updates.message.size)
        rows = min(ROWS * inside, self.most)
        finding = 2 * rows**2 * size + 10 * rows**3 + 2 * self.most * size * inside
        network = self.at_once * 6 * (2 * inside * self.width + 2 * self.width**2)
        learning = (self.training * network + finding) / OPERATIONS + practice_seconds(scene, self.most)
        return replace(super().estimate(scene), fit_seconds=learning)

    def _tries(self, scene: Scene, problem: Problem) -> Tries:
        return Tries((Try(problem, self.checked_recipe()),))


def estimated_noise(scene: Scene, flat: Tensor, principal: Principal, most: float) -> float:
    """The spread of the noise on the entries of one update, told from it alone; 0 where there is none.

    most: of the mean squares outside the principal directions that clean gradients have, the largest.
    """
    names = linear_layers(scene.public.model, scene.updates)
    if names:
        largest = max(names, key=lambda name: scene.updates.before[name][0].numel())
        return noise_beyond_rank(scene.updates.gradient[largest][0], most_rank(scene.updates))
    outside = float(_outside(principal, flat))
    return max(outside - principal.rest, 0.0) ** 0.5 if outside > most else 0.0


def filled(principal: Principal, known: Knowledge) -> Tensor:
    """An estimate of one gradient, in which entries count as they are trusted: (1, d).

    The others are filled in with what the trusted ones say of them along the principal directions, again and again.
    """
    target, weight = _flat(known.target), _flat(known.weight)
    trust = (weight / weight.amax(1, keepdim=True).clamp_min(1e-30)).clamp(0, 1)
    if bool((trust == 1).all()):
        return target
    found = torch.lerp(principal.center.expand_as(target), target, trust)
    shares = principal.variances / (principal.variances + principal.rest)
    for _ in range(FILLED):
        others = principal.center + (principal.coordinates(found) * shares) @ principal.directions.T
        found = torch.lerp(others, target, trust)
    return found


def _left(lab: Lab, denoiser: Denoiser, batches: Batches, streams: Streams) -> float:
    """The spread of the noise that a known defense leaves along a principal direction, on auxiliary batches."""
    size = lab.model.examples
    clean = made(Practice(replace(lab, chain=Chain()), size, batches).sent, batches, streams, _flat)

    def known(tree: Tree) -> Tensor:
        facts = lab.model.facts
        each = (tree.rows([row]) for row in range(tree.count))
        return torch.cat([filled(denoiser.principal, lab.chain.knowledge(one, facts)) for one in each])

    seen = made(Practice(lab, size, batches).sent, batches, streams, known)
    off = (seen - clean) @ denoiser.principal.directions
    return float(off.square().mean().sqrt())


def _flat(tree: Tree) -> Tensor:
    """Gradients as rows in single precision on the CPU. What is not finite counts as 0."""
    return torch.nan_to_num(tree.flat().float().cpu(), nan=0.0, posinf=0.0, neginf=0.0)


def _outside(principal: Principal, rows: Tensor) -> Tensor:
    """The mean square of what is outside the principal directions, of each of its own: (n,)."""
    off = principal.remainder(rows, principal.coordinates(rows))
    free = max(rows.shape[1] - len(principal.variances), 1)
    return off.square().sum(1) / free
