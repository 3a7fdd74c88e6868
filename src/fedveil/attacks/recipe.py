"""The choices that make a matching attack."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from fedveil.attacks.batch_norm import BatchNormStatistics
from fedveil.attacks.candidate import Candidate, Pixels
from fedveil.attacks.match import MATCHES, MatchName
from fedveil.attacks.optimizers import Adam, Optimizer
from fedveil.attacks.priors import Prior
from fedveil.attacks.together import Together

LabelsFrom = Literal["known", "idlg", "recovered", "optimized"]


class Objective(NamedTuple):
    """What is moved and what is made small in one phase: all of a recipe that a compiled function depends on."""

    match: MatchName
    candidate: Candidate
    priors: tuple[Prior | BatchNormStatistics, ...]
    seeds: int = 1  # searches for each victim


@dataclass(frozen=True)
class Phase:
    """Some steps of one optimizer. It starts from what the phase before it found."""

    steps: int
    optimizer: Optimizer = field(default_factory=Adam)
    match: MatchName | None = None  # another one than the recipe's
    candidate: Candidate | None = None  # another one than the recipe's
    priors: tuple[Prior | BatchNormStatistics, ...] | None = None  # others than the recipe's
    accepts: float | None = None  # keep what it finds only for victims whose final cost is below this
    reweighs: bool = False  # first trust every entry anew, by how well the inputs found so far explain it
    reorders: bool = False  # first look for the order of the local steps that explains the update best with these

    @property
    def seeds(self) -> int:
        """Searches for each victim, of an optimizer that makes several together."""
        return self.optimizer.seeds if isinstance(self.optimizer, Together) else 1


@dataclass(frozen=True)
class Recipe:
    """What is moved, what is made small, how, and where labels come from. The named attacks have the published ones."""

    match: MatchName = "cosine"
    candidate: Candidate = field(default_factory=Pixels)
    priors: tuple[Prior | BatchNormStatistics, ...] = ()
    tries: tuple[tuple[Phase, ...], ...] = ((Phase(1600),),)  # each of some phases; the lowest final cost wins
    labels: LabelsFrom = "known"
    # Whether the match of its last phase is the likelihood of a defense's noise, so that it can be tried only where
    # that is known: distances are then measured in units of the noise, per input. See `under_noise`.
    by_noise: bool = False
    # Among stronger priors: by how many nats for each example what it finds may explain an update worse than what the
    # others that say so find. The strongest within that counts. None: it is not held beside others.
    slack: float | None = None

    def objective(self, phase: Phase) -> Objective:
        """That of a phase."""
        return Objective(
            phase.match or self.match,
            phase.candidate or self.candidate,
            self.priors if phase.priors is None else phase.priors,
            phase.seeds,
        )

    @property
    def objectives(self) -> list[Objective]:
        """All that occur, each once."""
        found: list[Objective] = []
        for phase in (phase for phases in self.tries for phase in phases):
            if self.objective(phase) not in found:
                found.append(self.objective(phase))
        return found

    @property
    def reweighs(self) -> bool:
        """Whether any phase trusts entries anew."""
        return any(phase.reweighs for phases in self.tries for phase in phases)

    @property
    def steps(self) -> int:
        """Of one try."""
        return sum(phase.steps for phase in self.tries[0])

    @property
    def evaluations(self) -> int:
        """How often the objective is evaluated, over all tries."""
        return sum(phase.steps * phase.optimizer.evaluations for phases in self.tries for phase in phases)

    @property
    def seeds(self) -> int:
        """The most searches for each victim that any phase makes together."""
        return max(phase.seeds for phases in self.tries for phase in phases)

    def wrong(self) -> str | None:
        """What the engine cannot do of these choices, in one line: they may be a stranger's."""
        matches = [self.match, *(phase.match for phases in self.tries for phase in phases if phase.match)]
        for match in matches:
            if match not in MATCHES:
                return f"match must be one of {', '.join(MATCHES)} (got {match!r:.80})"
        if self.labels not in get_args(LabelsFrom):
            return f"labels must be one of {', '.join(get_args(LabelsFrom))} (got {self.labels!r:.80})"
        if not self.tries or not all(self.tries):
            return "tries must hold at least one try of at least one phase"
        for phase in (phase for phases in self.tries for phase in phases):
            if type(phase.steps) is not int or phase.steps < 1:
                return f"steps must be a whole number of at least 1 (got {phase.steps!r:.80})"
        if len({sum(phase.steps for phase in phases) for phases in self.tries}) > 1:
            return "all tries must have as many steps, so that they can be compared on the way"
        return None
