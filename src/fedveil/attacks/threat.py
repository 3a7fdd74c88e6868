"""What an attacker knows, has and may do: the threat model of an attack, in plain phrases."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

_HAS = {  # by what an attack needs
    "labels": "labels",
    "lengths": "sentence lengths",
    "auxiliary": "auxiliary data",
    "candidates": "candidates",
    "suspects": "examples in question",
}
_MAY = {
    "idlg": "reads the label off the update",
    "recovered": "reads the labels off the update",
    "optimized": "searches for the labels",
}
ALONE = "the update alone"
STATISTICS = "the batch-norm statistics"  # that the global model gathered, taken for those of the victim's data


@dataclass(frozen=True)
class ThreatModel:
    """What an attacker has beyond what every attacker has.

    Everyone has the update as it was sent, and knows the model, its weights, the loss, the learning rate, the batch
    size and the normalization of the data. Two rows of a table can be compared by the rest, which is in here.

    >>> ThreatModel(has=("labels", "auxiliary data (5,000 images)"), knows=("the defense",)).words
    'labels, auxiliary data (5,000 images), knows the defense'
    >>> ThreatModel().words
    'the update alone'
    """

    knows: tuple[str, ...] = ()  # "the defense", "the batch-norm statistics"
    has: tuple[str, ...] = ()  # "labels", "auxiliary data"
    may: tuple[str, ...] = ()  # "reads the labels off the update"

    @classmethod
    def of(cls, needs: Collection[str], labels_from: str | None = None) -> ThreatModel:
        """That of an attack that needs these things and gets labels from there."""
        has = tuple(words for need, words in _HAS.items() if need in needs)
        return cls(has=has, may=(_MAY[labels_from],) if labels_from in _MAY else ())

    @classmethod
    def union(cls, models: Iterable[ThreatModel]) -> ThreatModel:
        """That of one who may choose among several attackers: whatever any of them has."""
        listed = list(models)
        parts = {}
        for field in fields(cls):
            parts[field.name] = tuple(dict.fromkeys(item for each in listed for item in getattr(each, field.name)))
        return cls(**parts)

    @property
    def words(self) -> str:
        """All of it in one line."""
        return ", ".join([*self.has, *(f"knows {each}" for each in self.knows), *self.may]) or ALONE
