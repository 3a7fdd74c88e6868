"""FedBARRE: train a few local models on perturbed inputs, share the gradient of the best of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, Self

import pydantic
import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.defenses.ball import Per, Ring, check_per, not_padding, require_real_inputs
from fedveil.defenses.base import Defense, Facts, Knowledge, OwnModels, StepsBefore, Strength
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.errors import FedveilError
from fedveil.fields import Count, NonNegative, Positive, Probability, Repeats, RepeatsOrZero, declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs
from fedveil.tree import Tree

Models = Annotated[int, pydantic.Field(ge=1, le=100)]  # every step trains, validates and keeps them all


@defenses.register("fedbarre")
@declared
class FedBARRE(Defense):
    """Train several local models on clean and perturbed inputs; share the gradient of the best on validation data.

    Algorithm 2 of the paper. θ_1 starts at the global w and each further model at the one before. `epochs` times: draw
    δ ~ N(0, σ²) in the ring [ℓ, u], move it by `pgd_steps` plain gradient steps so that the loss falls, and step
    θ_m ← θ_m − ρ·∇L_total with L_total = λ·L(θ; x) + (1−λ)·L(θ; x+δ). The shared gradient is that of L_total at the
    model with the lowest loss on the client's own validation data, after its steps and not at w. `own_models` gives all
    models, for the randomized prediction that the paper adds. A model is validated as it would be used, in evaluation
    mode: without dropout, by the running statistics of batch norm. Warm-up rounds (8 in the paper) are a setting of the
    federation.

    Our reading: norms are L2 and per image; E, λ, σ and [ℓ, u] are not given in the paper, and its budget P is never
    defined as a radius. Buffers move once, in the pass at the clean x, as long as λ > 0.
    """

    place = "data"
    needs = frozenset({"validation"})
    paper = (
        "FedBARRE: Privacy-Utility Optimized Perturbation Ensemble against Gradient Leakage Attacks in Federated "
        "Learning"
    )
    weaknesses = (
        "With lam > 0 the clean x enters the shared gradient: whoever inverts it perfectly gets x itself.",
        "The local steps hide the weights at which the gradient was taken only from an attacker who does not "
        "repeat them.",
        "The gradient is taken after local steps, so the global model need not fit where it stands: where the loss is "
        "curved by more than 1/lr, the update leads away. With the published lr = 0.1 and no warm-up rounds the global "
        "model stayed at chance on Fashion-MNIST; with lr = 0.01 it learned as without a defense.",
        "The paper's claim of a convex risk does not hold: its Appendix B shows that it is concave in α.",
    )
    strength = Strength("high", "up", weak=8 / 255, strong=8.0)
    models: Models = 3  # M in the paper: local models of a client
    epochs: Repeats = 1  # E in the paper: steps of each model
    lam: Probability = 0.5  # λ in the paper: the share of the clean loss
    # σ in the paper: spread of the start of δ; none: u/√n, which is about the length u
    sigma: NonNegative | None = None
    low: NonNegative = 0.0  # ℓ in the paper: least length of δ, in the model's input space
    high: NonNegative = 8 / 255  # u in the paper: greatest length of δ
    per: Per = "example"  # what has its own δ of that length: an example, or each token of a text
    pgd_steps: RepeatsOrZero = 5  # T in the paper: steps that δ is moved by
    pgd_lr: NonNegative = 0.1  # η_δ in the paper: rate of such a step
    lr: NonNegative = 0.1  # ρ in the paper: rate of a model's step; see the weaknesses
    # "best": the model with the lowest validation loss. "mixed": all of them, weighted by the α that minimizes
    # Σ α_m·L_m − entropy·H(α) over the simplex (Appendix B): α = softmax(−L/entropy).
    selection: Literal["best", "mixed"] = "best"
    entropy: Positive = 0.1  # weight of the entropy penalty; our reading, used by "mixed"
    # The most examples of its own that a client validates a model on: more cost time and memory.
    validation_examples: Count = 64

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low must be at most high, {self.high:g} (got {self.low:g})")
        return self

    @property
    def ring(self) -> Ring:
        """The perturbations that are allowed."""
        return Ring(self.low, self.high, per=self.per)

    def gradient(self, batch: ClientBatch) -> StepResult:
        """Algorithm 2: the gradient of the total loss at the chosen model, or at all of them by their weights."""
        members, losses = self.train_ensemble(batch)
        alpha = self._weights(losses)
        if self.selection == "best":
            best = alpha.argmax(1)
            chosen = Member(_pick([m.params for m in members], best), _pick_rows([m.delta for m in members], best))
            return self._share(batch, chosen)
        parts = [self._share(batch, member) for member in members]
        weights = alpha.T
        update = parts[0].update * weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            update = update + part.update * weight
        loss = torch.stack([part.loss for part in parts]).mul(weights).sum(0)
        return replace(parts[0], update=update, loss=loss)

    def train_ensemble(self, batch: ClientBatch) -> Ensemble:
        """The local models θ_1 … θ_M that these clients train on this batch, with their losses on validation data.

        Nothing is shared and no buffer moves. One model needs no validation data.
        """
        if batch.validation is None and self.models > 1:
            raise FedveilError(
                "fedbarre chooses among its models by validation data of the client's own, and there is none: give "
                "some (Guard takes validation=(inputs, targets)), or use models=1"
            )
        require_real_inputs(batch, self.name)
        check_per(batch, self.per, self.name)
        params, members, losses = batch.params.map(torch.clone), [], []
        for model in range(self.models):
            delta = torch.empty(0)
            for epoch in range(self.epochs):
                delta = self._perturbation(batch, params, batch.streams.fold("model", model, "epoch", epoch))
                params = params - self._total(batch, Member(params, delta)) * self.lr
            members.append(Member(params, delta))
            if batch.validation is not None:
                losses.append(batch.validation.evaluation_loss(params))
        table = torch.stack(losses, 1) if losses else torch.zeros(batch.count, 1, device=batch.targets.device)
        return Ensemble(tuple(members), table)

    def own_models(self, batch: ClientBatch) -> OwnModels:
        """The randomized ensemble. The paper's accuracy may be that of the ensemble, not of the global model."""
        members, losses = self.train_ensemble(batch)
        return OwnModels("randomized ensemble", tuple(member.params for member in members), self._weights(losses))

    def _perturbation(self, batch: ClientBatch, params: Tree, streams: Streams) -> Tensor:
        inputs, real = batch.perturbed, not_padding(batch)
        turn = streams.fold("direction")

        def masked(values: Tensor) -> Tensor:
            return values if real is None else values * real

        def projected(delta: Tensor) -> Tensor:
            return self.ring.project(delta, lambda: masked(turn.normal_like(inputs)))

        size: int | Tensor = math.prod(inputs.shape[self.ring.axes :])
        if real is not None and self.per == "example":
            size = real.expand_as(inputs).flatten(2).sum(2).reshape(*inputs.shape[:2], *[1] * (inputs.dim() - 2))
        delta = projected(masked(self._sigma(size) * streams.normal_like(inputs)))
        for _ in range(self.pgd_steps):
            slope = batch.input_gradient(batch.with_perturbed(inputs + delta), params)
            delta = projected(delta - self.pgd_lr * masked(slope))
        return delta

    def _sigma(self, size: int | Tensor) -> float | Tensor:
        return self.high / size**0.5 if self.sigma is None else self.sigma

    def _terms(self, batch: ClientBatch, delta: Tensor) -> list[tuple[float, Inputs]]:
        """The parts of the total loss that count, the clean one first: (weight, inputs)."""
        moved = batch.with_perturbed(batch.perturbed + delta)
        return [(weight, at) for weight, at in ((self.lam, batch.inputs), (1 - self.lam, moved)) if weight]

    def _total(self, batch: ClientBatch, member: Member) -> Tree:
        terms = [batch.gradient(at, member.params) * weight for weight, at in self._terms(batch, member.delta)]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _share(self, batch: ClientBatch, member: Member) -> StepResult:
        """The gradient of the total loss that goes out. The first term moves the buffers, and tells what was seen."""
        terms = [(weight, batch.share(at, member.params)) for weight, at in self._terms(batch, member.delta)]
        weight, first = terms[0]
        update, loss = first.update * weight, first.loss * weight
        for weight, term in terms[1:]:
            update, loss = update + term.update * weight, loss + term.loss * weight
        return replace(first, update=update, loss=loss)

    def _weights(self, losses: Tensor) -> Tensor:
        """α of every client's models: shape (K, M)."""
        ranked = losses.nan_to_num(torch.inf)  # a model that went astray is never the best
        if self.selection == "mixed":
            return torch.softmax(-ranked / self.entropy, dim=1)
        return torch.nn.functional.one_hot(ranked.argmin(1), losses.shape[1]).to(losses)

    # ---- what is promised and known --------------------------------------------------------------------

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """None."""
        return Guarantee("Formal guarantee: none; the paper's budget is not a privacy parameter of the mechanism.")

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The update as it is, matched after the local steps, at inputs that may have moved.

        To first order the shared gradient is the one at x + (1−λ)δ. It was taken at θ_m* and not at w: the attacker
        repeats the m·E steps for every m that may have been chosen.
        """
        plain = super().knowledge(observed, facts)
        before = tuple(StepsBefore(m * self.epochs, self.lr) for m in range(1, self.models + 1)) if self.lr else ()
        return replace(plain, reach=(1 - self.lam) * self.high, before=before)

    def moves(self, batch: ClientBatch) -> Inputs:
        """x + (1−λ)δ with the first model's δ: the others start from weights that the attacker only guesses."""
        require_real_inputs(batch, self.name)
        delta = self._perturbation(batch, batch.params, batch.streams.fold("model", 0, "epoch", 0))
        return batch.with_perturbed(batch.perturbed + (1 - self.lam) * delta)

    def measures(self, update: Tree) -> dict[str, float]:
        """What the local training costs."""
        terms = 2 if 0 < self.lam < 1 else 1
        inner = self.models * self.epochs * (self.pgd_steps + terms)
        return {"extra gradients behind each shared one": float(inner + terms - 1)}


class Member(NamedTuple):
    """One model of every client, with the last perturbation it was trained on."""

    params: Tree
    delta: Tensor


class Ensemble(NamedTuple):
    """The local models of K clients. They never leave the clients: the server has the global model only."""

    members: tuple[Member, ...]
    losses: Tensor  # (K, M): of each on the client's own validation data


def _pick(trees: list[Tree], best: Tensor) -> Tree:
    """Each client's rows of the tree that is its best: shape (K,) of indices into the list."""
    return Tree({name: _pick_rows([tree[name] for tree in trees], best) for name in trees[0]})


def _pick_rows(tensors: list[Tensor], best: Tensor) -> Tensor:
    return torch.stack(tensors, 1)[torch.arange(len(best), device=best.device), best]
