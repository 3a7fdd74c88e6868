"""TAG: gradient attack on transformer-based language models (Deng et al. 2021)."""

from __future__ import annotations

from fedveil.attacks.match import MatchName
from fedveil.attacks.recipe import LabelsFrom
from fedveil.attacks.text_matching import LengthsFrom, TextMatching
from fedveil.fields import Count, Positive, declared
from fedveil.registry import attacks


@attacks.register("tag")
@declared
class TAG(TextMatching):
    """Match the gradient by squared and absolute distance in the space of token embeddings.

    The absolute part weighs less from layer to layer: the first layers, which are nearest to the tokens, count most.

    Our reading: the weight falls in a line from 0.01 at the first tensor to nothing behind the last; Adam starts from
    the best of many starts, as LAMP runs it.
    """

    paper = "Deng et al., TAG: Gradient Attack on Transformer-based Language Models, EMNLP Findings 2021"
    steps: Count = 500  # steps of Adam
    lr: Positive = 0.01  # Adam's rate at the start; it falls to 0.89 of itself every 50 steps
    starts: Count = 100  # random starts, of which the one that fits best is taken
    restarts: Count = 1  # tries; the one with the lowest final cost wins
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized
    lengths: LengthsFrom = "known"  # told, or read off the rank of the first attention layer's gradient

    def cost(self) -> MatchName:
        """L2, and L1 by layer."""
        return "l1-l2-by-layer"

    @classmethod
    def published(cls) -> TAG:
        """With LAMP's steps and starts."""
        return cls(steps=2000, starts=500)
