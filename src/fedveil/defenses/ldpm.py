"""LDPM (Jiang et al.): batches whose mix of classes is random, then clipping and noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, trusting
from fedveil.defenses.clip import clipped
from fedveil.defenses.densities import gaussian
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.defenses.noise import noisy
from fedveil.fields import NonNegative, Positive, declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree


@defenses.register("ldpm")
@declared
class LDPM(Defense):
    """Compose each batch of a random mix of classes, clip its gradient, and add N(0, sigma²).

    Our reading: FedEM names this baseline, a mechanism that protects the label distribution of a client, by its sigma
    (0.0005 to 0.1) only. The shares of the classes in a batch are drawn evenly from all possible ones (a flat
    Dirichlet), so that the labels of a batch do not follow those of the client. `Guard` cannot choose batches: there
    only clipping and noise act.
    """

    paper = "Jiang et al., Protecting label distribution in cross-silo federated learning (baseline of FedEM)"
    weaknesses = (
        "A mix of classes hides how often a client has them, not the examples in a batch.",
        "Which classes a client has at all is not hidden.",
        "Noise of one level hides the layers with small gradients only.",
        "Views of the same data in several rounds can be averaged.",
    )
    strength = Strength("sigma", "up", weak=5e-4, strong=0.1)
    sigma: NonNegative = 5e-4  # σ in FedEM: standard deviation of the noise on every entry
    clip: Positive = 1.0  # largest L2 norm of a batch's gradient

    def sample(self, labels: Tensor, size: int, streams: Streams) -> Tensor | None:
        """The indices of a batch: a random share of each class, and random examples of it, none of them twice.

        Where a class has too few examples, random others fill the gap.
        """
        if labels.dim() != 1 or labels.is_floating_point():
            return None  # no classes to mix
        order = streams.permutation(len(labels))[0]
        classes, member, stock = torch.unique(labels.cpu()[order], return_inverse=True, return_counts=True)
        share = -torch.log1p(-streams.uniform(len(classes), dtype=torch.float64)[0])  # exponential: a flat Dirichlet
        edges = share.cumsum(0) / share.sum().clamp_min(1e-300)
        slots = torch.searchsorted(edges, streams.uniform(size, dtype=torch.float64)[0], right=True)
        wanted = torch.bincount(slots.clamp_max(len(classes) - 1), minlength=len(classes))
        by_class = member.argsort(stable=True)
        rank = torch.empty_like(member)  # of an example within its class, in random order
        rank[by_class] = torch.arange(len(member)) - (stock.cumsum(0) - stock)[member[by_class]]
        last = (rank >= wanted[member]).to(torch.int8).argsort(stable=True)
        return order[last[:size]]

    def protect(self, update: Tree, call: Call) -> Tree:
        """g · min(1, clip/‖g‖) + N(0, sigma²)."""
        return noisy(clipped(update, self.clip), self.sigma, call.streams.normal_like)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """None is claimed."""
        return Guarantee(
            "Formal guarantee: none is claimed, and batches of a random mix of classes have none; dp-clip states that "
            "of clipping and noise alone."
        )

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """The gradient as it came, every entry trusted alike: under noise of one level no other match is likelier.

        To shrink and trust each layer by its share of signal costs the attacker 6 dB (lenet, digits, sigma = 0.01):
        the true gradient no longer fits a shrunk one. Clipping changes the length alone, which a cosine does not see.
        """
        known = facts.in_target(self.acts_at) is not None
        return trusting(observed, variance=self.sigma**2 if known else None, bound=self.clip if known else math.inf)

    def measures(self, update: Tree) -> dict[str, float]:
        """How often the clip acts, and the predicted cosine 1/√(1 + σ²d/‖g‖²) with ‖g‖ after clipping."""
        length = update.norm()
        ratio = self.sigma**2 * update.size / length.clamp_max(self.clip).square().clamp_min(1e-30)
        return {
            "share of gradients clipped": float((length > self.clip).double().mean()),
            "predicted cosine to the true gradient": float((1 + ratio).rsqrt().mean()),
        }

    @property
    def random(self) -> bool:
        """With any noise at all; for a given batch its composition is no matter of chance any more."""
        return self.sigma > 0

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Gaussian around what came in, clipped."""
        return gaussian(observed, clipped(given, self.clip), self.sigma)
