"""iDLG, improved deep leakage from gradients (Zhao et al. 2020)."""

from __future__ import annotations

from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.optimizers import LBFGS
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.fields import Count, Positive, declared
from fedveil.registry import attacks


@attacks.register("idlg")
@declared
class IDLG(GradientMatching):
    """DLG with the label of a single example read off the last layer's gradient. For batches of one."""

    paper = "Zhao, Mopuri, Bilen, iDLG: Improved Deep Leakage from Gradients, 2020"
    modalities = ("pictures", "records")
    steps: Count = 300  # outer steps of L-BFGS, each of 20 inner ones
    lr: Positive = 1.0  # length of a step of L-BFGS
    restarts: Count = 1  # tries; the one with the lowest final cost wins

    def recipe(self) -> Recipe:
        """Squared L2, L-BFGS, label read off."""
        phases = (Phase(self.steps, LBFGS(self.lr)),)
        return Recipe(match="l2", tries=(phases,) * self.restarts, labels="idlg")
