"""How a federation learns: the protocol and its settings."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from fedveil.defenses.base import MessageKind
from fedveil.fields import Count, CountOrZero, KeepProbability, NonNegative, Positive, declared

Momentum = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


@declared
class FederationSettings:
    """The settings of a run. Rounds count from 1.

    FedSGD exchanges one gradient per mini-batch: the server steps at once, with its own momentum and weight decay.
    FedAvg lets every client train `local_epochs` with its own momentum, reset each round, and then share its
    weights or their change.

    >>> FederationSettings(rounds=60, lr_steps=((51, 0.001),)).lr_at(51)
    0.001
    """

    protocol: Literal["fedsgd", "fedavg"] = "fedsgd"
    rounds: Count = 10
    batch_size: Count = 8
    lr: Positive = 0.1
    lr_steps: tuple[tuple[Count, Positive], ...] = ()  # (round, rate): from that round on, that rate
    sampling_rate: KeepProbability = 1.0  # share of the clients in a round: C in the papers
    weighting: Literal["uniform", "size"] = "uniform"  # of the mean; "size": by each client's number of examples
    momentum: Momentum = 0.0
    weight_decay: NonNegative = 0.0
    local_epochs: Count = 1  # FedAvg
    upload: Literal["weights", "delta"] = "weights"  # FedAvg: what a client shares
    warmup_rounds: CountOrZero = 0  # first rounds, without the defense
    patience: Count | None = None  # stop after so many rounds without a better validation accuracy; keep the best model
    evaluate_every: Count = 1  # the model is evaluated so many rounds apart, and after the last one
    record_rounds: tuple[Count, ...] = ()  # rounds whose first update of every client is captured
    record_clients: Count | None = None  # of these, the first so many clients of the round; None: all
    # Of the first so many clients of a round, models of their own are evaluated too: under FedAvg the local models
    # before their upload is protected, and what a defense lets a client keep (FedBARRE's ensemble).
    local_utility: CountOrZero = 0

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        wrong = []
        starts = [start for start, _ in self.lr_steps]
        if any(late <= early for early, late in itertools.pairwise(starts)):
            wrong.append(f"lr_steps must be in the order of their rounds (got {starts})")
        late = [number for number in self.record_rounds if number > self.rounds]
        if late:
            wrong.append(f"record_rounds must be between 1 and {self.rounds}, the last round (got {late[0]})")
        if len(set(self.record_rounds)) < len(self.record_rounds):
            wrong.append("record_rounds names a round twice")
        if self.patience is not None and self.evaluate_every > 1:
            wrong.append("patience needs every round evaluated: leave evaluate_every at 1")
        if self.protocol == "fedsgd" and self.local_epochs > 1:
            wrong.append(f"local_epochs needs the protocol fedavg (got {self.local_epochs})")
        if self.protocol == "fedsgd" and self.upload == "delta":
            wrong.append("upload='delta' needs the protocol fedavg: fedsgd shares gradients")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def message(self) -> MessageKind:
        """What a client's message carries."""
        return "gradient" if self.protocol == "fedsgd" else self.upload

    def evaluates(self, number: int) -> bool:
        """Whether the model is evaluated after a round."""
        return number % self.evaluate_every == 0 or number == self.rounds

    def lr_at(self, number: int) -> float:
        """The learning rate of a round."""
        return next((rate for start, rate in reversed(self.lr_steps) if start <= number), self.lr)
