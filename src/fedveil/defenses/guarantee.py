"""What defenses promise: the mechanism behind a guarantee, for the ledger to add up over a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exposure:
    """How much is sent over a run: what a guarantee must be composed over."""

    parameters: int  # entries of one update
    rounds: int
    steps_per_round: int  # updates a client sends in a round it takes part in
    sampling_rate: float  # share of clients in a round
    example_rate: float = 1.0  # share of a client's examples in one step
    delta: float = 1e-5  # the failure probability at which ε is stated

    @property
    def releases(self) -> int:
        """Updates that one client sends over the run if it takes part in every round."""
        return self.rounds * self.steps_per_round


@dataclass(frozen=True)
class PureLDP:
    """ε-LDP of one coordinate in one release, with no failure probability; `coordinates` of them are released."""

    epsilon: float
    coordinates: int


@dataclass(frozen=True)
class GaussianRelease:
    """A release with Gaussian noise of `noise_multiplier` times its sensitivity.

    `sampling_rate` below 1: each protected unit takes part in a release by Poisson sampling with this rate.
    """

    noise_multiplier: float
    releases: int
    sampling_rate: float = 1.0


@dataclass(frozen=True)
class LaplaceRelease:
    """A release that is ε-DP as a whole, such as Laplace noise of scale sensitivity/ε."""

    epsilon: float
    releases: int


@dataclass(frozen=True)
class Guarantee:
    """What a defense promises, in one honest sentence, and the mechanism that the ledger composes if it is formal."""

    sentence: str
    formal: bool = False
    protects: str = ""  # "one training example", "the sign of each weight", "a client's whole update"
    mechanism: PureLDP | GaussianRelease | LaplaceRelease | None = None


NO_GUARANTEE = Guarantee("Formal guarantee: none.")
