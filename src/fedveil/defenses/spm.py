"""SPM (symmetric piecewise mechanism): flip the sign of each weight at random and stretch its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, once_as_sent
from fedveil.defenses.densities import IMPOSSIBLE, Pair, either, summed
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.defenses.ldp import Epsilon, per_coordinate, randomized
from fedveil.defenses.sent_weights import Range, likely_change
from fedveil.fields import declared
from fedveil.registry import defenses
from fedveil.tree import Tree

_TINY = 1e-300  # keeps logarithms finite


class SignMechanism(Defense):
    """What SPM and PNPM share: all but the bound C = 1 + width/(e^ε − 1) of the factor.

    With probability e^ε/(e^ε+1) an entry keeps its sign, and its size is multiplied by a draw from U[1, C].
    """

    place = "upload"
    of = ("gradient", "weights", "delta")
    promises = "ε-LDP of each entry's sign, per round"
    weaknesses = (
        "Sizes are not protected: |ω| goes out times a factor between 1 and C whose law is known.",
        "Only signs are covered: between entries of different sizes the likelihood ratio has no bound.",
        "Zero stays zero: which inputs and units were silent shows exactly.",
        "In a gradient, sizes alone give the input of a first linear layer: every row is that input times a number.",
        "The sign of a weight is mostly known already from the server's own weights.",
        "ε is per entry and round: composed over a model it is no protection.",
    )
    strength = Strength("epsilon", "down", weak=5.0, strong=0.1)
    width: ClassVar[int]
    epsilon: Epsilon

    @property
    def divisor(self) -> float:
        """What the perturbed value is divided by at the end."""
        return 1.0

    @property
    def stretch(self) -> float:
        """C − 1, the length of the interval of the factor."""
        x = math.exp(-self.epsilon)  # at any ε finite, where e^ε is not
        return self.width * x / -math.expm1(-self.epsilon)

    @property
    def flip(self) -> float:
        """The probability that a sign is flipped: 1/(e^ε + 1)."""
        x = math.exp(-self.epsilon)
        return x / (1 + x)

    @property
    def mean_size(self) -> float:
        """E|t*|, the mean factor on an entry's size."""
        return (1 + self.stretch / 2) / self.divisor

    @property
    def mean(self) -> float:
        """E[t*]/t: 1 if unbiased."""
        return math.tanh(self.epsilon / 2) * self.mean_size

    @property
    def second_moment(self) -> float:
        """E[t*²]."""
        return (1 + self.stretch + self.stretch**2 / 3) / self.divisor**2

    @property
    def variance(self) -> float:
        """The variance of t*: times |ω|² it is that of an entry."""
        return max(self.second_moment - self.mean**2, 0.0)

    def protect(self, update: Tree, call: Call) -> Tree:
        """Algorithm 2: |ω|·t*, every entry anew."""

        def perturb(value: Tensor) -> Tensor:
            sign = 1 - 2 * call.streams.chance_like(value, self.flip)
            size = 1 + self.stretch * call.streams.uniform_like(value)
            return value * sign * size / self.divisor

        return update.entrywise(randomized(perturb))

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """ε of each sign in each round, composed over the run; sizes are not covered."""
        low, high = 1 / self.divisor, (1 + self.stretch) / self.divisor
        return per_coordinate(
            self.epsilon,
            exposure,
            each="entry's sign",
            protects="the sign of each entry, its size being public",
            remark=f"sizes are not covered, each goes out times a factor between {low:.3g} and {high:.3g}",
        )

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Sizes divided by their mean factor; signs trusted by the posterior; zeros trusted fully.

        On a gradient or a change of weights, |ω|·|t*| is divided by E|t*|, and a sign is worth
        2·P(right) − 1 = (e^ε−1)/(e^ε+1). An entry that is exactly zero was zero.

        On weights the attacker knows w_t too, and with it which signs were flipped and how far small weights moved: see
        `sent_weights`. At ε = 0.3 the cosine of the trusted part to the true change is 0.8 to 0.9, and that of what
        was sent 0.00 (lenet and mlp, digits, one step).
        """
        if facts.kind == "weights":
            if facts.before is None:
                return super().knowledge(observed, facts)
            return self._against(facts.before, observed, facts.step_scale)
        right = math.tanh(self.epsilon / 2)
        weight = observed.map(lambda tensor: torch.where(tensor == 0, torch.ones_like(tensor), right))
        return Knowledge(target=observed / self.mean_size, weight=weight)

    def together(self, views: Sequence[Knowledge], facts: Facts) -> Knowledge:
        """Every message narrows the range that |ω| lies in, |ω| ≤ |sent| ≤ C·|ω|, and the signs vote.

        The middle of the range, with the sign of the majority, trusted by 2·P(right) − 1. On weights each message is
        read by itself, against the weights that the server sent.
        """
        if facts.kind == "weights" or not once_as_sent(self, views, facts):
            return super().together(views, facts)
        target, weight = {}, {}
        for name in views[0].target:
            sent = torch.stack([each.target[name] for each in views])
            size, votes = sent.abs() * self.divisor, torch.sign(sent).sum(0)
            target[name] = torch.sign(votes) * (size.amin(0) + size.amax(0) / (1 + self.stretch)) / 2
            sure = torch.tanh(votes.abs() * self.epsilon / 2)
            weight[name] = torch.where((sent == 0).all(0), torch.ones_like(sure), sure)
        return Knowledge(target=Tree(target), weight=Tree(weight))

    def _against(self, before: Tree, observed: Tree, scale: float) -> Knowledge:
        of = Range(1 / self.divisor, (1 + self.stretch) / self.divisor, self.flip)
        found = {
            name: [
                likely_change(start - scale * change, start, of)
                for start, change in zip(before[name], tensor, strict=True)
            ]
            for name, tensor in observed.items()
        }
        changes, trust = (
            Tree({name: torch.stack([each[part] for each in rows]) for name, rows in found.items()}) for part in (0, 1)
        )
        return Knowledge(target=changes / scale, weight=trust)

    def measures(self, update: Tree) -> dict[str, float]:
        """Closed forms of Algorithm 2: the same factors for any update, since all is in proportion to |ω|."""
        return {
            "range factor C": 1 + self.stretch,
            "probability that a sign is right": 1 - self.flip,
            "predicted mean of an entry over its true value": self.mean,
            "predicted standard deviation of an entry over its size": self.variance**0.5,
            "predicted cosine of what is sent to what it was": self.mean / self.second_moment**0.5,
        }

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Uniform over [|ω|, C·|ω|], on the side of the right sign or on the other one; zero stays zero.

        The density is that of the logarithm of the size, which has no unit: |o|/(|ω|·(C − 1)) for an observed o.
        """
        log_right, log_wrong = math.log1p(-self.flip), math.log(max(self.flip, _TINY))

        def law(pair: Pair) -> Tensor:
            size, blur, sent = pair.given.abs(), pair.blur(pair.given), pair.sent.abs() * self.divisor
            # `blur` on either side: the right candidate's own rounding must not put it out of the range.
            inside = (sent >= size - blur) & (sent <= (1 + self.stretch) * (size + blur))
            width = self.stretch * size + 2 * blur
            chance = either(pair.sent * pair.given > 0, log_right, log_wrong)
            moved = torch.where(pair.sent == 0, 0.0, chance + torch.log((sent / width).clamp_min(_TINY)))
            return torch.where(inside, moved, chance - IMPOSSIBLE)

        return summed(observed, given, law)


@defenses.register("spm")
@declared
class SPM(SignMechanism):
    """Flip each sign with probability 1/(e^ε+1) and multiply each size by a factor from U[1, C].

    C = (e^ε+1)/(e^ε−1). As published (Algorithm 2) the mean of an entry is e^ε/(e^ε+1) of its true value, 0.574 at
    ε = 0.3: the paper's density (its Eq. 3) integrates to 1 + e^−ε, so its theorem of zero bias and its variance do
    not hold for its algorithm. `debias` divides by that factor.

    It acts on what is uploaded: weights (the paper's Algorithm 1) or their change, and under FedSGD every gradient.
    The last is our reading of the paper's attack tables, which perturb the gradient of one sample. Zeros stay zero.
    """

    place = "upload"
    paper = (
        "Chen and Zheng, SPM-FL: A Federated Learning Privacy-Protection Mechanism Based on Local Differential Privacy"
    )
    width = 2
    epsilon: Epsilon = 0.3  # ε in the paper: the budget of each entry and round; 0.3 is the paper's for MNIST
    debias: bool = False  # divide by the factor that the published algorithm shrinks entries by

    @property
    def divisor(self) -> float:
        """e^ε/(e^ε+1) if debiased, else 1."""
        return 1 - self.flip if self.debias else 1.0
