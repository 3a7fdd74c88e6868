"""GradInversion (Yin et al. 2021)."""

from __future__ import annotations

from dataclasses import replace

from fedveil.attacks.batch_norm import BatchNormStatistics, require_statistics
from fedveil.attacks.match import MatchName
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.polish import polishing
from fedveil.attacks.priors import MeanSquare, Prior, TotalVariation
from fedveil.attacks.recipe import LabelsFrom, Phase, Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.threat import STATISTICS, ThreatModel
from fedveil.attacks.together import Together
from fedveil.fields import Count, CountOrZero, NonNegative, Positive, Repeats, RepeatsOrZero, declared
from fedveil.registry import attacks

SMOOTHER = (1e-1, 3e-2, 1e-2)  # weights of the prior that are tried where a defense adds noise


@attacks.register("grad-inversion")
@declared
class GradInversion(GradientMatching):
    """Match the gradient by squared distance from several starts that are drawn to what they agree on.

    Each of `seeds` searches moves its own pictures by Adam, with noise that shrinks with the rate. From a quarter of
    the steps on it is also drawn to the consensus of all: the mean of their pictures, put in one order and registered.
    Of the searches and their consensus the one that matches best is handed in. Priors: total variation, the mean square
    of the pictures, and, only if `statistics` is on, the batch-norm statistics of the global model. That these are
    those of the victim's data is a strong thing to know: by default they are not used.

    Our reading: pictures of equal labels are assigned to each other (the paper supposes that no label occurs twice);
    pictures are registered by whole pixels and not by a network (RANSAC-flow); the distance is relative to the size of
    the update, and weights count means over pixels, so that they serve models and pictures of any size. And what is
    found is polished by L-BFGS, as for Inverting Gradients; the published form is without it.
    """

    paper = "Yin, Mallya, Vahdat, Alvarez, Kautz, Molchanov, See through Gradients, CVPR 2021"
    steps: Count = 400  # steps of Adam
    lr: Positive = 0.3  # Adam's rate: it rises over `warmup` steps, and falls as a cosine does
    seeds: Repeats = 4  # searches for each victim, from starts of their own
    group: NonNegative = 1e-2  # α_group in the paper: weight of the squared distance to the searches' consensus
    total_variation: NonNegative = 1e-2  # α_TV in the paper: weight of the prior that favors smooth pictures
    mean_square: NonNegative = 1e-6  # α_l2 in the paper: weight of the mean square of the pictures
    statistics: bool = False  # whether the attacker uses the batch-norm statistics of the global model
    batch_norm: Positive = 0.1  # α_BN in the paper: weight of the distance to these statistics
    noise: NonNegative = 0.02  # α_n in the paper: normal noise added to every step, in parts of the rate
    warmup: CountOrZero = 20  # steps over which the rate rises
    cost: MatchName = "relative-l2"  # how the updates are compared
    # Steps of L-BFGS at the end, each of 20 inner ones: squared distance, kept where it comes to explain the update.
    polish: RepeatsOrZero = 20
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized with the pixels

    @property
    def threat(self) -> ThreatModel:
        """With the batch-norm statistics, where they are used."""
        plain = super().threat
        return replace(plain, knows=(*plain.knows, STATISTICS)) if self.statistics else plain

    def check(self, scene: Scene) -> None:
        """Refuse a model without batch-norm statistics, if they are to be used."""
        if self.statistics:
            require_statistics(scene.public.model)

    def recipe(self) -> Recipe:
        """Squared distance, several searches of Adam together, and the priors."""
        return self._recipe(self.total_variation, self.polish)

    def under_noise(self) -> tuple[Recipe, ...]:
        """The same with more total variation."""
        strengths = [weight for weight in SMOOTHER if weight > self.total_variation]
        return tuple(self._recipe(weight, polish=0) for weight in strengths)

    def _recipe(self, total_variation: float, polish: int) -> Recipe:
        priors: list[Prior | BatchNormStatistics] = []
        priors += [TotalVariation(total_variation)] if total_variation else []
        priors += [MeanSquare(self.mean_square)] if self.mean_square else []
        priors += [BatchNormStatistics(self.batch_norm)] if self.statistics else []
        together = Together(seeds=self.seeds, lr=self.lr, pull=self.group, noise=self.noise, warmup=self.warmup)
        descent = Phase(self.steps, together)
        phases = (descent, polishing(polish)) if polish else (descent,)
        return Recipe(match=self.cost, priors=tuple(priors), tries=(phases,), labels=self.labels)

    @classmethod
    def published(cls, *, statistics: bool = False) -> GradInversion:
        """As published: 20,000 steps, 8 searches, their weights; with the batch-norm prior only where asked for.

        Weights count our terms, which are means over pixels, channels and layers; theirs are norms of whole batches.
        """
        return cls(
            steps=20_000,
            lr=0.1,
            seeds=8,
            group=0.01,
            total_variation=1e-4,
            mean_square=1e-6,
            statistics=statistics,
            batch_norm=0.1,
            noise=0.2,
            warmup=50,
            cost="l2",
            polish=0,
            labels="recovered",
        )
