"""PM (Wang et al.): the piecewise mechanism draws values mostly near the true one, sometimes from the whole range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedveil.defenses.base import Facts, Knowledge
from fedveil.defenses.densities import Pair, either, summed
from fedveil.defenses.ldp import BoundedMechanism, precision_measures
from fedveil.defenses.sent_weights import SPREADS, cut_normal, mixed_posterior
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

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The expected entry given what was sent, trusted by how sure it is.

        What was sent tells an interval in which ω most likely lies. It tells nothing new where that interval holds
        all that ω may be, and much where one of its ends cuts that range: most entries are noise, a few are not.
        Changes are taken as a mix of normals around zero, fitted to what was sent; whole weights as such changes of
        those that the server sent. Where changes are about 2 % of the bound, the weighted cosine of this to the true
        change is 0.85 at ε = 6, and that of what was sent 0.16; at ε = 0.3 neither tells anything (0.004 and 0.002).
        """
        before = facts.before
        if facts.kind == "weights" and before is None:
            return super().knowledge(observed, facts)
        found = {
            name: [
                likely_entry(-facts.step_scale * sent / self.bound, row / self.bound, self.epsilon)
                for sent, row in zip(
                    tensor,
                    before[name] if facts.kind == "weights" and before is not None else torch.zeros_like(tensor),
                    strict=True,
                )
            ]
            for name, tensor in observed.items()
        }
        change, trust = (
            Tree({name: torch.stack([each[part] for each in rows]) for name, rows in found.items()}) for part in (0, 1)
        )
        return Knowledge(target=change * (-self.bound / facts.step_scale), weight=trust)

    def measures(self, update: Tree) -> dict[str, float]:
        """The range and the standard deviation of an entry of zero; it grows by ω²/(e^{ε/2}−1) under the root."""
        return precision_measures(1 / math.tanh(self.epsilon / 4), self.base_variance**0.5, self.bound)

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Uniform near the entry, and e^−ε times that in the rest of the range."""
        x, rest = _tail(self.epsilon)

        def law(pair: Pair) -> Tensor:
            t = (pair.given / self.bound).clamp(-1, 1)
            sent = pair.sent / self.bound * rest
            return either((sent - t).abs() <= x + pair.blur(sent) + pair.blur(t), 0.0, -self.epsilon)

        return summed(observed, given, law)


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


def likely_entry(moved: Tensor, start: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The expected change t − start of every entry, and how sure it is: its square over the expected square.

    moved: what was sent less the start, for one client's tensor. The chance of what was sent is the same for all t in
    an interval [a, b], and e^−ε times that for all others.
    """
    x, rest = _tail(epsilon)
    value, begin = (moved + start).double().flatten(), start.double().flatten()
    # From y = (t + x·v)/(1 − x) with |v| ≤ 1. Entries beyond the bound are cut to it, so they all share one t.
    low, high = value * rest - x, value * rest + x
    low, high = torch.where(low <= -1, -torch.inf, low), torch.where(high >= 1, torch.inf, high)
    spreads = SPREADS.to(value.device)[:, None]

    def posteriors(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        ends = [((end[part] - begin[part]) / spreads).clamp(-1e6, 1e6) for end in (low, high)]
        log_mass, mean, variance = cut_normal(*ends)
        inside = -math.expm1(-epsilon) * log_mass.exp()
        chance = (inside + x**2).clamp_min(1e-300)
        square = (inside * (variance + mean.square()) + x**2) / chance
        return chance.log(), spreads * inside * mean / chance, spreads.square() * square

    change, square = mixed_posterior(posteriors, len(value))
    sure = (change.square() / square.clamp_min(1e-300)).clamp(0, 1)
    return change.reshape(moved.shape).to(moved.dtype), sure.reshape(moved.shape).to(moved.dtype)


def _tail(epsilon: float) -> tuple[float, float]:
    """x = e^{−ε/2} and 1 − x, in which all of PM is written so that no ε overflows: C = (1 + x)/(1 − x)."""
    return math.exp(-epsilon / 2), -math.expm1(-epsilon / 2)
