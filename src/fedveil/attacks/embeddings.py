"""Matching attacks on sentences: embeddings that are moved, and what keeps them like those of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedveil.attacks.batch_norm import BatchNormStatistics
from fedveil.attacks.candidate import Candidate, Found, Pixels, Variables
from fedveil.attacks.embedding_space import EmbeddingSpace
from fedveil.attacks.priors import Box, Prior
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.streams import Streams


@dataclass(frozen=True)
class Embeddings(Pixels):
    """Embeddings of tokens (B, places, width). They start at random, as long as one of the vocabulary in the mean."""

    deviation: float = 1.0  # of each number at the start: see `fitting_text`

    def start(self, problem: Problem, streams: Streams, found: Found | None = None) -> Variables:
        """Noise, or what was found."""
        started = super().start(problem, streams, found)
        return started if found is not None else {name: self.deviation * each for name, each in started.items()}


@dataclass(frozen=True)
class EmbeddingNorm:
    """`weight` times the squared difference of the mean length of embeddings from that in the vocabulary (LAMP)."""

    weight: float
    norm: float = 1.0  # see `fitting_text`

    def __call__(self, inputs: Tensor, box: Box | None = None) -> Tensor:
        """The weighted prior of embeddings (B, places, width)."""
        squares = inputs.square().sum(-1)
        return self.weight * ((squares + 1e-12).sqrt().mean() - self.norm).square()


def fitting_text(recipe: Recipe, space: EmbeddingSpace) -> Recipe:
    """The recipe in the units of a vocabulary's embeddings."""
    deviation = space.norm / space.table.shape[1] ** 0.5

    def candidate(given: Candidate) -> Candidate:
        return replace(given, deviation=deviation) if isinstance(given, Embeddings) else given

    def priors(
        given: tuple[Prior | BatchNormStatistics, ...],
    ) -> tuple[Prior | BatchNormStatistics, ...]:
        return tuple(replace(each, norm=space.norm) if isinstance(each, EmbeddingNorm) else each for each in given)

    def phase(given: Phase) -> Phase:
        return replace(
            given,
            candidate=None if given.candidate is None else candidate(given.candidate),
            priors=None if given.priors is None else priors(given.priors),
        )

    return replace(
        recipe,
        candidate=candidate(recipe.candidate),
        priors=priors(recipe.priors),
        tries=tuple(tuple(phase(each) for each in phases) for phases in recipe.tries),
    )
