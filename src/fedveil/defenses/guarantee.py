"""What defenses promise: the mechanism behind a guarantee, for the ledger to add up over a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

# What a formal guarantee covers, in the words of the ledger.
ONE_EXAMPLE = "one training example"
ALL_DATA = "all data of a client"


@dataclass(frozen=True)
class Exposure:
    """How much one client sends over a run: what a guarantee must be composed over."""

    parameters: int  # entries of one update
    rounds: int  # with the defense
    steps_per_round: int  # updates a client sends in a round it takes part in
    sampling_rate: float  # share of clients in a round
    example_rate: float = 1.0  # share of a client's examples in one step
    delta: float = 1e-5  # the failure probability at which ε is stated
    local_steps: int = 1  # gradients behind one update
    bare_rounds: int = 0  # warm-up rounds, without the defense
    bare_buffers: bool = False  # the model's buffers (batch norm statistics) travel beside the update, without noise
    dtypes: tuple[str, ...] = ("float32",)  # of the numbers in an update
    seeded: bool = True  # noise is drawn from a seed, as in a simulation

    @property
    def releases(self) -> int:
        """Updates that one client sends over the run if it takes part in every round."""
        return self.rounds * self.steps_per_round

    def uses(self, place: str) -> int:
        """How often a defense at a place meets one client's data: with every gradient, or with every update."""
        return self.releases * (1 if place in ("upload", "server") else self.local_steps)


def exposure_of(
    weights: Mapping[str, Tensor], *, seeded: bool, bare_buffers: bool = False, delta: float = 1e-5
) -> Exposure:
    """What all releases of such weights have in common; a ledger counts how many there are."""
    return Exposure(
        parameters=sum(tensor.numel() for tensor in weights.values()),
        rounds=0,
        steps_per_round=1,
        sampling_rate=1.0,
        delta=delta,
        bare_buffers=bare_buffers,
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})),
        seeded=seeded,
    )


@dataclass(frozen=True, kw_only=True)
class Counted(Exposure):
    """How much one client really sent. Rounds need not be alike; in a loop of one's own there may be none."""

    gradients: int  # that the defenses of the gradient acted on
    uploads: int  # messages that the defenses of the upload acted on
    means: int = 0  # of a trusted server, in which the client may have had a part
    bare: int = 0  # messages that went out without the defense

    @property
    def releases(self) -> int:
        """Updates that the client sent: a loop that uploads nothing sends its gradients."""
        return self.uploads or self.gradients

    def uses(self, place: str) -> int:
        """How often a defense at a place met the client's data."""
        return {"upload": self.uploads, "server": self.means}.get(place, self.gradients)


@dataclass(frozen=True)
class PureLDP:
    """ε-LDP of one coordinate in one release, with no failure probability; `coordinates` of them are released."""

    epsilon: float
    coordinates: int


@dataclass(frozen=True)
class GaussianRelease:
    """A release with Gaussian noise of `noise_multiplier` times its sensitivity.

    `sampling_rate` below 1: a protected unit takes part in a release with this chance, unseen. "poisson": each unit
    by a coin of its own, and neighbors differ by one unit more or less. "fixed": equally many units every time, and
    neighbors differ in what one unit holds.
    """

    noise_multiplier: float
    releases: int
    sampling_rate: float = 1.0
    sampling: Literal["poisson", "fixed"] = "poisson"


@dataclass(frozen=True)
class LaplaceRelease:
    """A release that is ε-DP as a whole, such as Laplace noise of scale sensitivity/ε."""

    epsilon: float
    releases: int


Mechanism = PureLDP | GaussianRelease | LaplaceRelease


@dataclass(frozen=True)
class Guarantee:
    """What a defense promises, in one honest sentence, and the mechanism that the ledger composes if it is formal."""

    sentence: str
    formal: bool = False
    protects: str = ""  # "one training example", "the sign of each weight", "all data of a client"
    mechanism: Mechanism | None = None
    caveat: str = ""  # a sentence that must appear wherever the number does


NO_GUARANTEE = Guarantee("Formal guarantee: none.")
