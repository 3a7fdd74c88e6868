"""DLG, deep leakage from gradients (Zhu et al. 2019)."""

from __future__ import annotations

from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.optimizers import LBFGS
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.fields import Count, Positive, declared
from fedveil.registry import attacks


@attacks.register("dlg")
@declared
class DLG(GradientMatching):
    """Match the gradient by squared distance with L-BFGS, optimizing pixels and soft labels together.

    As published: 300 outer steps of 20 inner iterations, rate 1, pixels start from N(0, 1) and are not boxed while
    the search runs. The engine clamps the outcome to valid pixels.
    """

    paper = "Zhu, Liu, Han, Deep Leakage from Gradients, NeurIPS 2019"
    modalities = ("pictures", "records")
    steps: Count = 300  # outer steps of L-BFGS, each of 20 inner ones
    lr: Positive = 1.0  # length of a step of L-BFGS
    restarts: Count = 1  # tries; the one with the lowest final cost wins

    def recipe(self) -> Recipe:
        """Squared L2, L-BFGS, labels optimized."""
        phases = (Phase(self.steps, LBFGS(self.lr)),)
        return Recipe(match="l2", tries=(phases,) * self.restarts, labels="optimized")
