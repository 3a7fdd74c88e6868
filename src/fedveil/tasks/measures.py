"""What a model is judged by: classes by accuracy, several labels by AUROC, numbers by their squared error, running
text by perplexity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MOST_LOSS = 700.0  # e to more than that is no number

MetricName = Literal["accuracy", "AUROC", "mean squared error", "perplexity"]


@dataclass(frozen=True)
class Measure:
    """How to read and write one measure."""

    share: bool = True  # a fraction, shown in percent
    lower_is_better: bool = False
    without_model: str = "always naming the most frequent class"  # the best that one gets without a model
    of_losses: bool = False  # e to the mean of its values; differences are then judged as a share of the whole

    def shown(self, value: float) -> str:
        """A value in words.

        >>> Measure().shown(0.912), Measure(share=False).shown(0.01234)
        ('91.2 %', '0.0123')
        """
        return _minus(f"{100 * value:.1f} %" if self.share else f"{value:.3g}")

    def change(self, value: float) -> str:
        """A difference of two values, with its sign."""
        return _minus(f"{100 * value:+.1f} points" if self.share else f"{value:+.3g}")

    def of_mean(self, value: float) -> float:
        """The measure from the mean of one value per example.

        >>> round(MEASURES["perplexity"].of_mean(3.0), 1), MEASURES["accuracy"].of_mean(0.5)
        (20.1, 0.5)
        """
        return math.exp(min(value, MOST_LOSS)) if self.of_losses else value

    def gain(self, value: float) -> float:
        """A value, or a difference, so that more is better."""
        return -value if self.lower_is_better else value


def _minus(text: str) -> str:
    """With a real minus sign."""
    return text.replace("-", "−")


MEASURES = {
    "accuracy": Measure(),
    "AUROC": Measure(without_model="the same scores for all examples"),
    "mean squared error": Measure(share=False, lower_is_better=True, without_model="always answering the mean"),
    "mean absolute error": Measure(share=False, lower_is_better=True),
    "R²": Measure(share=False),
    "MCC": Measure(share=False),
    "perplexity": Measure(
        share=False,
        lower_is_better=True,
        without_model="guessing by how frequent each token is",
        of_losses=True,
    ),
}


def measure(name: str) -> Measure:
    """The measure of a name; one that is not known is a fraction."""
    return MEASURES.get(name, Measure())


def metric_of(kind: str) -> MetricName:
    """What tasks with targets of this kind are judged by: see `TargetForm`."""
    by_kind: dict[str, MetricName] = {
        "labels": "AUROC",
        "numbers": "mean squared error",
        "tokens": "perplexity",
    }
    return by_kind.get(kind, "accuracy")
