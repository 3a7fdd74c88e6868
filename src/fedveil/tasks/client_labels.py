"""How the labels are distributed over the clients, and one number for how different the clients are."""

from __future__ import annotations

from functools import cache
from math import exp, lgamma
from statistics import fmean
from typing import Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, model_validator


class ClientLabels(BaseModel):
    """How many training examples every client has, and how many of each label. Plain data, kept with a result."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    labels: list[str]  # their names; empty for running text
    sizes: list[PositiveInt]  # examples of each client
    counts: list[list[NonNegativeInt]]  # clients × labels
    several: bool = False  # an example may have several labels, or none, and counts for each that it has
    partition: str = ""  # as the command line writes it, if known

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.sizes:
            raise ValueError("there must be at least one client")
        if len(self.counts) != len(self.sizes) or any(len(row) != len(self.labels) for row in self.counts):
            raise ValueError(f"counts must be {len(self.sizes)} clients × {len(self.labels)} labels")
        return self

    @property
    def totals(self) -> list[int]:
        """Examples of each label over all clients."""
        return [sum(column) for column in zip(*self.counts, strict=True)]

    @property
    def labels_per_client(self) -> float:
        """How many different labels a client has, on average."""
        return fmean(sum(count > 0 for count in row) for row in self.counts)

    @property
    def distance(self) -> float:
        """Mean over clients of the total-variation distance between a client's labels and all labels together.

        0: every client has the labels in the same proportions. 1: clients have hardly any labels in common. Clients
        without any label (possible only if an example can have several) are left out.

        >>> ClientLabels(labels=["a", "b"], sizes=[4, 4], counts=[[4, 0], [0, 4]]).distance
        0.5
        """
        totals = self.totals
        every = sum(totals)
        found = [
            sum(abs(count / sum(row) - total / every) for count, total in zip(row, totals, strict=True)) / 2
            for row in self.counts
            if any(row)
        ]
        return fmean(found) if found else 0.0

    @property
    def distance_by_chance(self) -> float:
        """The expected distance if clients of these sizes got random examples: small clients differ by chance."""
        totals = self.totals
        every = sum(totals)

        @cache
        def expected(size: int) -> float:
            return sum(_mean_deviation(every, total, size) for total in totals) / size / 2

        found = [expected(sum(row)) for row in self.counts if any(row)]
        return fmean(found) if found else 0.0


def _mean_deviation(every: int, marked: int, drawn: int) -> float:
    """E|X − E X| of a hypergeometric X: the number of marked items among `drawn`, if `marked` of `every` are marked.

    De Moivre's closed form: 2r(N − K − n + r)/N · P(X = r), with r the first whole number above the mean.
    """
    r = drawn * marked // every + 1
    if r > min(drawn, marked):  # X cannot exceed its mean: it is constant
        return 0.0
    probability = exp(_log_choose(marked, r) + _log_choose(every - marked, drawn - r) - _log_choose(every, drawn))
    return 2 * r * (every - marked - drawn + r) / every * probability


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
