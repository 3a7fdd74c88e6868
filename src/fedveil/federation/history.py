"""What is noted of every round."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Utility(BaseModel):
    """Accuracy as a fraction; None where it cannot be measured (no such data, or outputs that are not classes)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
