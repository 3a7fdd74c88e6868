"""FedEM: take the gradient at inputs that were moved, within a small ball, to where the loss is lower."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Self

import pydantic
import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch
from fedveil.defenses.ball import Norm, Per, Ring, check_per, not_padding, require_real_inputs
from fedveil.defenses.base import Defense, Facts, Knowledge, Strength
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.errors import FedveilError
from fedveil.fields import NonNegative, Positive, Repeats, declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs
from fedveil.tree import Tree


@defenses.register("fedem")
@declared
class FedEM(Defense):
    """Add to every input a perturbation within a small ball that lowers the loss, and share the gradient there.

    Algorithm 1 of the paper. For each batch an inner model w_u starts at the global w; `steps` times
    δ ← Proj(δ − α·sign(∇_δ L(w_u; x+δ))) and w_u ← w_u − η·∇L(w_u; x+δ); the shared gradient is the one at x+δ and the
    *global* w. δ starts at random in each round, is carried over its batches, and a short last batch uses its first
    rows. It lives in the model's input space, unclamped; for text in the space of the embeddings, with padding left as
    it is (the paper's radius is 2 for CoLA and SST-2, 5 for WikiText-2). Each shared gradient costs `steps` input
    gradients and as many weight gradients.

    Our reading: the norm is taken per image; the lengths of the random start are uniform; L∞ grows by scaling; the
    last inner step of w_u is left out, since nothing comes after it. At the paper's 8/255 one sign step is many times
    longer than the ball, so that each step overwrites δ: `step="relative"` makes the search a real one.
    """

    place = "data"
    paper = "FedEM: A Privacy-Preserving Framework for Concurrent Utility Preservation in Federated Learning"
    weaknesses = (
        "Whoever inverts the gradient perfectly gets x+δ, within the radius of x: at 8/255 a visually exact copy.",
        "The paper's Lemma 1 bounds leakage by the mean of δ over a batch, not by the size of each δ.",
        "At the paper's radius the lemma promises a leakage of at most 0.9997 of 1.",
    )
    strength = Strength("radius", "up", weak=8 / 255, strong=8.0)
    steps: Repeats = 15  # N in the paper: steps that δ is moved by
    alpha: Positive = 0.1  # α_u in the paper: length of a sign step; not used by step="relative"
    inner_lr: NonNegative = 0.1  # η in the paper: rate of the inner model w_u
    radius: NonNegative = 8 / 255  # ρ_u^max in the paper: greatest length of δ, in the model's input space
    min_radius: NonNegative = 0.0  # ρ_u^min in the paper: least length of δ
    norm: Norm = "l2"  # how the length of δ is measured
    per: Per = "example"  # what has its own δ of that length: an example, or each token of a text
    # "sign": α·sign(∇), the paper's. "relative": sign(∇) scaled to the length 2.5·radius/steps in the norm of the ball.
    step: Literal["sign", "relative"] = "sign"
    freeze: bool = False  # the inner model w_u stays at the global w
    std: tuple[Positive, ...] = ()  # the channels' standard deviations; if given, δ is measured in pixels of [0, 1]

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_radius > self.radius:
            raise ValueError(f"min_radius must be at most the radius, {self.radius:g} (got {self.min_radius:g})")
        return self

    @property
    def ring(self) -> Ring:
        """The perturbations that are allowed."""
        return Ring(self.min_radius, self.radius, self.norm, self.per)

    def perturb(self, batch: ClientBatch) -> Inputs:
        """The inner loop of Algorithm 1."""
        require_real_inputs(batch, self.name)
        check_per(batch, self.per, self.name)
        inputs, unit = batch.perturbed, self._unit(batch.perturbed, axes=2)
        delta, carried = self._carried(batch)
        real = not_padding(batch)
        if real is not None:
            delta = delta * real
        # A copy of its own from the start: one compiled function then serves all inner steps.
        weights = batch.params if self.freeze else batch.params.map(torch.clone)
        for step in range(self.steps):
            slope = batch.input_gradient(batch.with_perturbed(inputs + delta / unit), weights) / unit
            focus = self._focus(slope, real)
            if step == 0:
                delta = torch.cat([delta[:, :carried], torch.where(focus, delta, 0.0)[:, carried:]], dim=1)
            delta = delta - self._move(torch.where(focus, slope, 0.0))
            delta = self._project(delta, focus, batch.streams.fold("direction", step))
            if not self.freeze and step + 1 < self.steps:
                gradient = batch.gradient(batch.with_perturbed(inputs + delta / unit), weights)
                weights = weights - gradient * self.inner_lr
        self._keep(batch, delta)
        return batch.with_perturbed(inputs + delta / unit)

    # ---- the parts that FedCRAP changes ----------------------------------------------------------------

    def _focus(self, slope: Tensor, real: Tensor | None) -> Tensor:
        """Where this step may move the perturbation: everywhere but at padding."""
        return torch.ones_like(slope, dtype=torch.bool) if real is None else real.expand_as(slope)

    def _project(self, delta: Tensor, focus: Tensor, streams: Streams) -> Tensor:
        return self.ring.project(delta, lambda: torch.where(focus, streams.normal_like(delta), 0.0))

    # ---- one step, and the memory ----------------------------------------------------------------------

    def _move(self, slope: Tensor) -> Tensor:
        sign = slope.sign()
        if self.step == "sign":
            return self.alpha * sign
        return 2.5 * self.radius / self.steps * sign / self.ring.length(sign).clamp_min(1.0)

    def _carried(self, batch: ClientBatch) -> tuple[Tensor, int]:
        """The perturbation carried over from earlier batches, filled up with fresh rows, and how many were carried."""
        like, size = batch.perturbed, batch.perturbed.shape[1]
        kept = batch.state.get("delta")
        if kept is None or kept.shape[2:] != like.shape[2:]:
            kept = like[:, :0]
        carried = min(size, kept.shape[1])
        if carried == size:
            return kept[:, :size], carried
        fresh = self.ring.start(batch.streams.fold("start"), like[:, carried:])
        return torch.cat([kept, fresh], dim=1), carried

    def _keep(self, batch: ClientBatch, delta: Tensor) -> None:
        """A short batch moves the first rows; the others stay for the next."""
        kept = batch.state.get("delta")
        if kept is not None and kept.shape[2:] == delta.shape[2:]:
            delta = torch.cat([delta, kept[:, delta.shape[1] :]], dim=1)
        batch.state["delta"] = delta

    def _unit(self, inputs: Tensor, axes: int) -> Tensor | float:
        """The divisor that takes δ to input space: pixels are divided by the channel's standard deviation."""
        if not self.std:
            return 1.0
        if inputs.dim() != axes + 3 or inputs.shape[-3] != len(self.std):
            raise FedveilError(
                f"{self.name}: std has {len(self.std)} channels, which inputs of shape {tuple(inputs.shape[axes:])} "
                "do not have: leave std out, or give one number per channel of (channels, height, width)"
            )
        return torch.tensor(self.std, dtype=inputs.dtype, device=inputs.device).reshape(-1, 1, 1)

    # ---- what is promised and known --------------------------------------------------------------------

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """None."""
        return Guarantee(
            "Formal guarantee: none; the gradient is exact, taken at inputs that lie close to the true ones."
        )

    @property
    def moved_share(self) -> float:
        """The share of an input's entries that a step moves."""
        return 1.0

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The gradient is exact, at x+δ, and δ follows from x but for its random start: invert, then replay.

        No entry moves by more than the radius, nor by more than all sign steps together; the random start, which they
        soon outweigh, is left out of that. Sign steps move all entries alike: in L2 the radius is shared out.
        """
        most = min(self.radius, self.alpha * self.steps) if self.step == "sign" else self.radius
        scale = min(self.std, default=1.0)
        bounded = self.norm == "l2" and self.per == "example"
        length = self.radius / self.moved_share**0.5 / scale if bounded else math.inf
        return replace(super().knowledge(observed, facts), reach=most / scale, length=length)

    def measures(self, update: Tree) -> dict[str, float]:
        """What the search costs."""
        passes = self.steps + (0 if self.freeze else self.steps - 1)
        return {"extra gradients behind each shared one": float(passes)}

    @property
    def random(self) -> bool:
        """By its random start, if there is room for any."""
        return self.radius > 0
