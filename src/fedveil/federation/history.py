"""What is noted of every round."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fedveil.tasks.measures import MetricName, measure


class Utility(BaseModel):
    """How good a model is; None where it cannot be measured (no such data, or outputs that are no predictions).

    A fraction, but for errors: see `Measure`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: MetricName = "accuracy"
    validation: float | None = None
    test: float | None = None
    train: float | None = None  # on a sample of the training part: see `evaluate.TRAINING`
    others: dict[str, float] = {}  # other measures of the same model on the test part: accuracy beside AUROC, R²
    beside: dict[str, float] = {}  # test utility of other models than the server's, by what they are: see `own_models`

    @property
    def told(self) -> str:
        """The test utility in words: "accuracy 91.2 %"; empty where it was not measured."""
        return "" if self.test is None else f"{self.metric} {measure(self.metric).shown(self.test)}"

    @property
    def standing(self) -> float:
        """The validation utility, so that more is better: by it early stopping compares rounds."""
        if self.validation is None:
            return -math.inf if measure(self.metric).lower_is_better else 0.0
        return measure(self.metric).gain(self.validation)


class Perturbation(BaseModel):
    """How far a data defense moved the inputs of the captured clients. Their side of it: no server sees this."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: Literal["pixels", "input"]  # pixels of [0, 1], or the model's input space where no normalization is known
    mean: float  # |change| of one entry
    l2: float  # length of an example's change, mean and greatest
    l2_max: float
    linf: float  # greatest change within an example, mean and greatest
    linf_max: float
    l2_input: float  # mean length in the model's input space, in which radii are given

    def __str__(self) -> str:
        if self.unit == "input":
            return f"an input moves by {self.mean:.3g} in the mean and {self.linf_max:.3g} at most (L2 {self.l2:.3g})"
        return (
            f"a pixel moves by {255 * self.mean:.2g}/255 in the mean and {255 * self.linf_max:.2g}/255 at most "
            f"(L2 {self.l2:.3g} in pixels, {self.l2_input:.3g} in the model's input space)"
        )


class RoundRecord(BaseModel):
    """One round: who took part, what it cost and how good the model was after it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: int
    utility: Utility
    train_loss: float  # mean over all examples of the round, each at the weights of its step
    seconds: float  # of training and exchange, without evaluation
    bytes_up: int  # sent by one client, mean over the round's clients
    bytes_down: int
    clients: list[int]
    refused: dict[int, str] = {}  # clients of whom an update was not taken, and the first reason: they cost their share
    perturbation: Perturbation | None = None  # of the captured clients; None without them, or where nothing was moved
