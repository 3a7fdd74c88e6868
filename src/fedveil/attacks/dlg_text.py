"""DLG on sentences: embeddings by squared distance (Zhu et al. 2019)."""

from __future__ import annotations

from fedveil.attacks.match import MatchName
from fedveil.attacks.recipe import LabelsFrom
from fedveil.attacks.text_matching import LengthsFrom, TextMatching
from fedveil.fields import Count, Positive, declared
from fedveil.registry import attacks


@attacks.register("dlg-text")
@declared
class DLGText(TextMatching):
    """Match the gradient by squared distance in the space of token embeddings, and hand in the nearest tokens.

    Our reading: as LAMP runs it, with Adam from the best of many starts.
    """

    paper = "Zhu, Liu, Han, Deep Leakage from Gradients, NeurIPS 2019"
    steps: Count = 500  # steps of Adam
    lr: Positive = 0.01  # Adam's rate at the start; it falls to 0.89 of itself every 50 steps
    starts: Count = 100  # random starts, of which the one that fits best is taken
    restarts: Count = 1  # tries; the one with the lowest final cost wins
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized
    lengths: LengthsFrom = "known"  # told, or read off the rank of the first attention layer's gradient

    def cost(self) -> MatchName:
        """Squared distance."""
        return "l2"

    @classmethod
    def published(cls) -> DLGText:
        """With LAMP's steps and starts."""
        return cls(steps=2000, starts=500)
