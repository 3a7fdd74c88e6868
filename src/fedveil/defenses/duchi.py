"""Duchi et al.: every entry becomes one of two values, with odds that make its mean right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedveil.defenses.base import Facts, Knowledge
from fedveil.defenses.densities import Pair, log_odds_of_two, summed
from fedveil.defenses.ldp import BoundedMechanism, precision_measures
from fedveil.fields import declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree


@defenses.register("duchi")
@declared
class Duchi(BoundedMechanism):
    """Send ±bound·C for every entry, with C = (e^ε+1)/(e^ε−1), plus with the odds that make the mean right.

    With t = ω/bound in [−1, 1], P(+) = ½ + t(e^ε−1)/(2(e^ε+1)). Our reading: values are clamped to
    [−bound, bound] and scaled by it, since the mechanism is for [−1, 1]; beyond the bound the mean is the bound.
    One bound serves all layers: for weights or their change, not for the gradients of FedSGD.
    """

    place = "upload"
    paper = "Duchi, Jordan, Wainwright, Local privacy, data processing inequalities, and statistical minimax rates"
    weaknesses = (
        "Every entry goes out with at least the size of the bound: few clients cannot average that away.",
        "Entries beyond the bound are cut, which biases them.",
        "ε is per entry and round: composed over a model it is no protection.",
    )

    def draw(self, t: Tensor, streams: Streams) -> Tensor:
        """See `duchi`."""
        return duchi(t, self.epsilon, streams)

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Shrunk by the share of signal, and trusted by it: the same for every entry.

        What is sent has one size, so nothing in it tells how strong a layer's signal is. The share takes entries as
        uniform within the bound: (bound²/3)/(bound·C)². On weights, w_t shows which of them lie near the bound and are
        more certain; compared with one step's change all of them are noise, so this is not used.
        """
        share = signal_prior(self.epsilon)
        return Knowledge(target=observed * share, weight=observed.map(lambda tensor: torch.full_like(tensor, share)))

    def measures(self, update: Tree) -> dict[str, float]:
        """The range and the standard deviation √(bound²C² − ω²), at ω = 0 where it is largest."""
        factor = range_factor(self.epsilon)
        return precision_measures(factor, self.bound * factor, self.bound)

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """The chance of the one of two values that was sent."""

        def law(pair: Pair) -> Tensor:
            return log_odds_of_two(pair.given / self.bound, pair.sent > 0, self.epsilon)

        return summed(observed, given, law)


def duchi(t: Tensor, epsilon: float, streams: Streams) -> Tensor:
    """±C for every entry of t, which is clamped to [−1, 1]: the mean is t."""
    t = t.clamp(-1, 1)
    x, size = math.exp(-epsilon), t.abs()
    # P(the other sign), in a form that does not cancel where it is small: ½ − |t|(e^ε−1)/(2(e^ε+1)).
    other = streams.uniform_like(t) < ((1 - size) + x * (1 + size)) / (2 * (1 + x))  # also at a draw of 0
    return torch.where((t >= 0) ^ other, 1.0, -1.0).to(t.dtype) * range_factor(epsilon)


def range_factor(epsilon: float) -> float:
    """C = (e^ε+1)/(e^ε−1)."""
    return 1 / math.tanh(epsilon / 2)


def signal_prior(epsilon: float) -> float:
    """The share of signal in the spread of what is sent, for entries uniform in the range: 1/(3C²)."""
    return math.tanh(epsilon / 2) ** 2 / 3
