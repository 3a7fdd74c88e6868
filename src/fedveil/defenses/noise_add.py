"""Noise-Add (Wu et al.): noise of each layer's own size on the update."""

from __future__ import annotations

from torch import Tensor

from fedveil.clients.batch import ClientBatch
from fedveil.defenses.base import Defense, Facts, Knowledge, Strength
from fedveil.fields import NonNegative, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, matrix, per_client


@defenses.register("noise-add")
@declared
class NoiseAdd(Defense):
    """Add zero-mean Gaussian noise to the update, `ratio` times each layer's own spread.

    Our reading: FedBARRE names this baseline without its settings. The spread of a layer is the root mean square of
    its tensor in the message, so that weights get noise in proportion to the weights, a gradient or a change of
    weights in proportion to itself, and the cosine to the true message is 1/√(1 + ratio²) whatever it is.
    """

    place = "upload"
    paper = "Wu et al., Privacy-preserving federated learning based on noise addition (baseline of FedBARRE)"
    weaknesses = (
        "Noise that scales with the update hides no layer more than another: none is drowned.",
        "The noise shrinks with the update, so its size tells the size of the update.",
        "Views of the same data in several rounds can be averaged.",
    )
    strength = Strength("ratio", "up")
    ratio: NonNegative = 0.1

    def protect(self, update: Tree, batch: ClientBatch) -> Tree:
        """Each tensor plus N(0, (ratio · its root mean square)²)."""

        def add(tensor: Tensor) -> Tensor:
            spread = per_client(matrix(tensor).square().mean(1).sqrt(), tensor)
            return tensor + self.ratio * spread * batch.streams.normal_like(tensor)

        return update.map(add)

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Shrink by the share of signal, 1/(1 + ratio²) in every layer, and trust by it.

        Noise on whole weights is proportional to the weights, which an observed pseudo-gradient does not show: there
        the share is not known, and all entries are taken as they are.
        """
        known = super().knowledge(observed, facts)
        if facts.kind == "weights":
            return known
        share = 1 / (1 + self.ratio**2)
        return Knowledge(target=observed * share, weight=known.weight * share)

    def measures(self, update: Tree) -> dict[str, float]:
        """The predicted cosine 1/√(1 + ratio²) of the message (weights, change of weights or gradient) to the true one.

        A change of weights that an attacker forms from noisy weights is far noisier than that.
        """
        return {"predicted cosine to the true message": (1 + self.ratio**2) ** -0.5}
