"""Noise-Add (Wu et al.): noise of each layer's own size on the update."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength
from fedveil.defenses.densities import Pair, log_normal_density, root_mean_square, summed
from fedveil.defenses.noise import tell_lost_noise
from fedveil.fields import NonNegative, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, at_least_single, matrix, per_client


@defenses.register("noise-add")
@declared
class NoiseAdd(Defense):
    """Add zero-mean Gaussian noise to the update, `ratio` times each layer's own spread.

    Our reading: FedBARRE names this baseline without its settings. The spread of a layer is the root mean square of
    its tensor in the message, so that weights get noise in proportion to the weights, a gradient or a change of
    weights in proportion to itself, and the cosine to the true message is 1/√(1 + ratio²) in any case.
    """

    place = "upload"
    paper = "Wu et al., Privacy-preserving federated learning based on noise addition (baseline of FedBARRE)"
    weaknesses = (
        "Noise that scales with each layer drowns none: an attacker who weighs them by it uses them all.",
        "The noise shrinks with the update, so its size tells the size of the update.",
        "Views of the same data in several rounds can be averaged.",
    )
    strength = Strength("ratio", "up", weak=0.1, strong=10.0)
    ratio: NonNegative = 0.1  # spread of the noise, as a multiple of each layer's own

    def protect(self, update: Tree, call: Call) -> Tree:
        """Each tensor plus N(0, (ratio · its root mean square)²)."""

        def add(tensor: Tensor) -> Tensor:
            wide = at_least_single(tensor)
            spread = per_client(matrix(wide).square().mean(1).sqrt(), wide)
            return (wide + self.ratio * spread * call.streams.normal_like(wide)).to(tensor.dtype)

        found = update.map(add)
        if self.ratio:
            tell_lost_noise(update, found, f"noise of {self.ratio:.3g} times each layer's spread")
        return found

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The update as it came, each layer trusted by the inverse of its noise's variance: the likeliest match.

        That variance is ratio²/(1 + ratio²) of the layer's observed mean square. It is worth 5 to 7 dB over equal
        trust (lenet and mlp, digits). Noise on whole weights is in proportion to the weights, which the server sent.
        """
        shown = facts.before if facts.kind == "weights" else observed
        if shown is None or self.ratio == 0:
            return super().knowledge(observed, facts)
        spread = {name: matrix(shown[name]).square().mean(1) for name in observed}
        quietest = torch.stack([torch.where(s > 0, s, torch.inf) for s in spread.values()]).amin(0)

        def trust(name: str, tensor: Tensor) -> Tensor:
            share = torch.where(spread[name] > 0, quietest / spread[name], 1.0)  # a layer of zeros has no noise
            return per_client(share, tensor).expand_as(tensor)

        weight = Tree({name: trust(name, tensor) for name, tensor in observed.items()})
        return Knowledge(target=observed, weight=weight, noise=self._noise(observed, spread, facts))

    def _noise(self, observed: Tree, spread: dict[str, Tensor], facts: Facts) -> Tree:
        """The variance of the noise on every entry, given the mean square of each layer of what was sent."""
        share = self.ratio**2 if facts.kind == "weights" else self.ratio**2 / (1 + self.ratio**2)
        factor = share * (1 / facts.step_scale**2 if facts.kind == "weights" else 1.0)
        return Tree({n: per_client(factor * spread[n], tensor).expand_as(tensor) for n, tensor in observed.items()})

    def measures(self, update: Tree) -> dict[str, float]:
        """The predicted cosine 1/√(1 + ratio²) of the message (weights, change of weights or gradient) to the true one.

        A change of weights that an attacker forms from noisy weights is far noisier than that.
        """
        return {"predicted cosine to the true message": (1 + self.ratio**2) ** -0.5}

    @property
    def random(self) -> bool:
        """With any noise at all."""
        return self.ratio > 0

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Gaussian around what came in, with a spread that is the candidate's own."""

        def law(pair: Pair) -> Tensor:
            spread = torch.maximum(self.ratio * root_mean_square(pair.given), pair.blur(pair.given))
            return log_normal_density(pair.sent - pair.given, spread)

        return summed(observed, given, law)
