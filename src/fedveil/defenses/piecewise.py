"""PM (Wang et al.): the piecewise mechanism, most likely near the true value, now and then anywhere in the range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedveil.defenses.ldp import BoundedMechanism, precision_measures
from fedveil.fields import declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree


@defenses.register("pm")
@declared
class PM(BoundedMechanism):
    """Draw each entry anew from [−bound·C, bound·C], from an interval around it with high probability.

    C = (e^{ε/2}+1)/(e^{ε/2}−1). With t = ω/bound in [−1, 1]: with probability e^{ε/2}/(e^{ε/2}+1) uniform in
    [ℓ, r], ℓ = (C+1)t/2 − (C−1)/2 and r = ℓ + C − 1, else uniform in the rest of [−C, C]. Our reading: values are
    clamped to [−bound, bound] and scaled by it, since the mechanism is for [−1, 1]; beyond the bound the mean is
    the bound. One bound serves all layers: for weights or their change, not for the gradients of FedSGD.
    """

    place = "upload"
    paper = "Wang et al., Collecting and analyzing multidimensional data with local differential privacy"
    weaknesses = (
        "At a small ε the noise is many times the bound: few clients cannot average that away.",
        "Entries beyond the bound are cut, which biases them.",
        "ε is per entry and round: composed over a model it is no protection.",
    )

    def draw(self, t: Tensor, streams: Streams) -> Tensor:
        """See `piecewise`."""
        return piecewise(t, self.epsilon, streams)

    @property
    def base_variance(self) -> float:
        """The variance of an entry of zero: bound²(e^{ε/2}+3)/(3(e^{ε/2}−1)²)."""
        x, rest = _tail(self.epsilon)
        return self.bound**2 * (x + 3 * x**2) / (3 * rest**2)

    def measures(self, update: Tree) -> dict[str, float]:
        """The range and the standard deviation of an entry of zero; it grows by ω²/(e^{ε/2}−1) under the root."""
        return precision_measures(1 / math.tanh(self.epsilon / 4), self.base_variance**0.5, self.bound)


def piecewise(t: Tensor, epsilon: float, streams: Streams) -> Tensor:
    """A draw from [−C, C] for every entry of t, which is clamped to [−1, 1]: the mean is t.

    With v uniform in [−1, 1) and x = e^{−ε/2}, all over 1 − x: [ℓ, r] is t + x·v, and v moved by x away from t is the
    rest of [−C, C], v below t to the left of ℓ and above it to the right of r.
    """
    t = t.clamp(-1, 1)
    x, rest = _tail(epsilon)
    far = streams.chance_like(t, x / (1 + x))
    v = streams.uniform_like(t).mul_(2).sub_(1)
    near, outside = t + x * v, v + torch.copysign(t.new_tensor(x), v - t)
    return near.lerp_(outside, far).div_(rest)


def _tail(epsilon: float) -> tuple[float, float]:
    """x = e^{−ε/2} and 1 − x, in which all of PM is written so that no ε overflows: C = (1 + x)/(1 − x)."""
    return math.exp(-epsilon / 2), -math.expm1(-epsilon / 2)
