"""Matching attacks on rows of a table: numbers move as pixels do, categories as weights of their column's choices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.attacks.batch_norm import BatchNormStatistics
from fedveil.attacks.candidate import Candidate, Found, Learned, Pixels, Variables
from fedveil.attacks.priors import MeanSquare, Prior, TotalVariation
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout

FARTHEST = 8.0  # a logit: the softmax of two that lie so far apart from each other is 0 and 1 but for rounding


@dataclass(frozen=True)
class Cells:
    """Rows of a table: numbers themselves, and for each category a softmax over the places of its column.

    While the search runs a row may be a mixture of categories. What an attack hands in is settled afterwards.
    """

    pixels: Pixels  # how numbers start and are held in their range
    blocks: tuple[tuple[int, int], ...]  # where categories stand: see `Columns.blocks`

    def start(self, problem: Problem, streams: Streams, found: Found | None = None) -> Variables:
        """Noise; or the variables that the phase before came to, which say more than its inputs."""
        if found is not None:
            return {"inputs": found.variables["inputs"].detach().clone()}
        return self.pixels.start(problem, streams)

    def decode(self, variables: Variables, learned: Learned) -> Tensor:
        """Numbers as they are, and the softmax of every category."""
        rows = variables["inputs"]
        parts, end = [], 0
        for start, stop in self.blocks:
            parts += [rows[..., end:start], rows[..., start:stop].softmax(-1)]
            end = stop
        return torch.cat([*parts, rows[..., end:]], -1) if parts else rows

    def cost(self, variables: Variables) -> Tensor | None:
        """Nothing."""
        return None

    def project(self, variables: Variables, problem: Problem) -> None:
        """Clamp numbers to their range, and what stands for categories to where it still can turn."""
        rows = variables["inputs"]
        logits = [rows[..., start:stop].clamp(-FARTHEST, FARTHEST) for start, stop in self.blocks]
        self.pixels.project(variables, problem)
        for (start, stop), kept in zip(self.blocks, logits, strict=True):
            rows[..., start:stop] = kept


def fitting(recipe: Recipe, layout: Layout) -> Recipe:
    """The recipe for this kind of data: of pictures as it is; of rows with their own candidate and priors.

    Neighboring places of a row have nothing in common, so what favors smooth pictures favors rows near the mean: that
    of every number is 0.
    """
    columns = layout.columns
    if columns is None:
        return recipe

    def candidate(given: Candidate) -> Candidate:
        return Cells(given, columns.blocks) if isinstance(given, Pixels) else given

    def phase(given: Phase) -> Phase:
        return replace(
            given,
            candidate=None if given.candidate is None else candidate(given.candidate),
            priors=None if given.priors is None else tuple(map(_of_rows, given.priors)),
        )

    return replace(
        recipe,
        candidate=candidate(recipe.candidate),
        priors=tuple(map(_of_rows, recipe.priors)),
        tries=tuple(tuple(phase(each) for each in phases) for phases in recipe.tries),
    )


def _of_rows(prior: Prior | BatchNormStatistics) -> Prior | BatchNormStatistics:
    return MeanSquare(prior.weight) if isinstance(prior, TotalVariation) else prior
