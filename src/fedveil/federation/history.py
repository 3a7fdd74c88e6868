"""What is noted of every round."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Utility(BaseModel):
    """A fraction; None where it cannot be measured (no such data, or outputs that are neither classes nor labels)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: Literal["accuracy", "AUROC"] = "accuracy"
    validation: float | None = None
    test: float | None = None


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
