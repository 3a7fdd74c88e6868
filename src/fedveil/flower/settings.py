"""How a federation over Flower learns."""

from __future__ import annotations

from typing import Literal, Self

import pydantic
from pydantic import Field

from fedveil.defenses.base import MessageKind
from fedveil.federation.schedule import sampled_clients
from fedveil.federation.settings import Momentum
from fedveil.fields import Count, KeepProbability, NonNegative, Positive, declared
from fedveil.intake import LONGEST

Aggregation = Literal["mean", "median", "trimmed-mean", "krum"]


@declared
class ServerSettings:
    """What the server does. Rounds count from 1.

    >>> ServerSettings(rounds=3, aggregation="krum", malicious=1, minimum=5).asked_of(10)
    10
    """

    rounds: Count = 3
    seed: int = Field(default=0, ge=0)  # of the sampling of clients
    sampling_rate: KeepProbability = 1.0  # share of the clients in a round
    clients: Count | None = None  # how many there are; none given: those that are there when the run begins
    minimum: Count = 2  # updates without which a round changes nothing, and nodes without which none begins
    wait: Positive = 300.0  # seconds to wait for nodes
    limit: Positive = 600.0  # seconds of a round; longer than a client trains, or it misses the next one too
    # What clients send: weights, or a gradient. "delta": weights too, but it was their change that was protected.
    kind: MessageKind = "weights"
    aggregation: Aggregation = "mean"
    weighting: Literal["uniform", "size"] = "uniform"  # of the mean; "size": by the examples that clients tell
    trim: float = Field(default=0.2, ge=0, lt=0.5)  # of trimmed-mean: share of the clients cut off at each end
    malicious: int = Field(default=0, ge=0)  # of krum: clients that may be malicious
    longest: Positive = LONGEST  # norm of the change that a client may make; a longer one is refused
    lr: Positive = 0.1  # of the server's step, where clients send gradients
    momentum: Momentum = 0.0
    weight_decay: NonNegative = 0.0
    evaluate_every: Count = 1
    record_rounds: tuple[Count, ...] = ()  # rounds whose updates are captured
    record_clients: Count | None = None  # of these, the first so many clients; None: all
    track: tuple[Literal["tensorboard", "mlflow"], ...] = ()  # where results go, beside rounds.jsonl

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.aggregation == "krum" and self.minimum < 2 * self.malicious + 3:
            raise ValueError(
                f"krum with {self.malicious} malicious clients needs a minimum of {2 * self.malicious + 3} (got "
                f"{self.minimum})"
            )
        if self.clients is not None and self.minimum > self.asked_of(self.clients):
            raise ValueError(
                f"minimum is {self.minimum}, but only {self.asked_of(self.clients)} of {self.clients} clients are "
                "asked in a round"
            )
        return self

    def asked_of(self, clients: int) -> int:
        """How many of so many clients are asked in a round."""
        return len(sampled_clients(0, clients, self.sampling_rate, 1))


@declared
class LocalSteps:
    """What is public of the clients' training: captures tell it, and the ledger counts by it."""

    batch_size: Count
    lr: Positive
    local_epochs: Count = 1
    momentum: Momentum = 0.0
    weight_decay: NonNegative = 0.0
    batches_per_message: Count = 1  # where gradients are sent: the batches whose gradients one message is the mean of

    def sizes(self, examples: int, kind: MessageKind) -> tuple[int, ...]:
        """The batch sizes behind a message of a client with so many examples; a gradient is of one step."""
        if kind == "gradient":
            return (max(1, min(examples, self.batch_size * self.batches_per_message)),)
        whole, rest = divmod(examples, self.batch_size)
        epoch = (self.batch_size,) * whole + ((rest,) if rest else ())
        return epoch * self.local_epochs or (1,)

    def steps(self, examples: int, kind: MessageKind) -> int:
        """How many gradients are behind a message."""
        if kind == "gradient":
            return self.batches_per_message
        return max(1, -(-examples // self.batch_size) * self.local_epochs)
