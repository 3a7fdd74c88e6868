"""LAMP: sentences from gradients with the help of a language model (Balunović et al. 2022)."""

from __future__ import annotations

from dataclasses import replace

from fedveil.attacks.language import NGRAM
from fedveil.attacks.match import MatchName
from fedveil.attacks.rearranging import Rearranging
from fedveil.attacks.recipe import LabelsFrom, Recipe
from fedveil.attacks.text_matching import LengthsFrom, TextMatching
from fedveil.fields import Count, NonNegative, Positive, RepeatsOrZero, declared
from fedveil.registry import attacks

MORE_FLUENT = (5.0, 2.0)  # times the weight of language that is tried where a defense adds noise


@attacks.register("lamp")
@declared
class LAMP(TextMatching):
    """Move embeddings by the gradient's slope, and tokens by moves that the gradient and a language model agree on.

    Adam starts from the best of many starts. A prior keeps embeddings about as long as those of the vocabulary. Every
    few steps rearrangements of tokens are drawn, each a swap, a token or a span that moves, or a beginning that goes to
    the end; the best is kept by how it matches and by how likely its nearest tokens are as a sentence. The embedding
    layer's own gradient is not used: where it is shared, token-rows reads it.

    `language` is "n-gram" or "small" (a small causal transformer), both trained on auxiliary sentences, "none", a file
    of text (an n-gram model of its lines), the folder or name of any causal model of the library transformers, or a
    file of llama.cpp's (.gguf).

    Our reading: fewer steps and moves than published, for short sentences; `published` has those of the paper.
    """

    paper = (
        "Balunović, Dimitrov, Jovanović, Vechev, LAMP: Extracting Text from Gradients with Language Model Priors, 2022"
    )
    steps: Count = 500  # steps of Adam
    lr: Positive = 0.01  # Adam's rate at the start; it falls to 0.89 of itself every 50 steps
    starts: Count = 100  # random starts, of which the one that fits best is taken
    every: Count = 50  # steps from one look at moves to the next
    moves: RepeatsOrZero = 60  # rearrangements that are looked at together
    match: MatchName = "layer-cosine"  # L_cos in the paper; l1-l2: L_tag
    norm: NonNegative = 1.0  # α_reg in the paper: weight of the prior on the length of embeddings
    language: str = NGRAM  # n-gram, small, none, a file of text, or a causal model
    fluency: NonNegative = 0.2  # α_lm in the paper: weight of the language prior
    restarts: Count = 1  # tries; the one with the lowest final cost wins
    labels: LabelsFrom = "known"  # told, read off the update (idlg: of a batch of one), or optimized
    lengths: LengthsFrom = "known"  # told, or read off the rank of the first attention layer's gradient

    def cost(self) -> MatchName:
        """As chosen."""
        return self.match

    def search(self) -> Rearranging:
        """With moves of tokens."""
        return Rearranging(lr=self.lr, starts=self.starts, every=self.every, moves=self.moves, fluency=self.fluency)

    def norm_weight(self) -> float:
        """As chosen."""
        return self.norm

    @property
    def language_name(self) -> str:
        """As chosen."""
        return self.language

    def under_noise(self) -> tuple[Recipe, ...]:
        """The same with more weight on language, the most first."""
        if not self.moves or not self.fluency:
            return ()
        return tuple(replace(self, fluency=times * self.fluency).recipe() for times in MORE_FLUENT)

    @classmethod
    def published(cls) -> LAMP:
        """With the steps, starts and moves of the paper, and cosine."""
        return cls(steps=2000, starts=500, every=75, moves=200)

    @classmethod
    def published_tag(cls) -> LAMP:
        """The same with TAG's distance, and the weights that go with it."""
        return cls(steps=2000, starts=500, every=75, moves=200, match="l1-l2", norm=25.0, fluency=60.0)
