"""What an audit attacks and how it judges."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from fedveil.errors import FedveilError
from fedveil.fields import Count, NonNegative, Positive, Probability, declared
from fedveil.leakage.records import TOLERANCE
from fedveil.registry import datasets
from fedveil.tasks.own_files import Reference, is_reference

HELD_OUT, NONE = "held-out", "none"  # words for `auxiliary` that name no data set


@declared
class AuditSettings:
    """The settings of an audit beside the task, the defense, the attack and the federation.

    Victims are updates: each is what one client would share of one batch at the model of an attacked round. Round 1
    is the model before training; a later round needs a federation that trains that long.
    """

    victims: Count = 16  # attacked updates per attacked round
    batch_size: Count = 1  # examples behind each attacked update
    # Messages about each attacked batch that the attacker saw, at the same model, each with fresh random numbers of the
    # defense: what it draws anew each time can be averaged away.
    views: Count = 1
    source: Literal["clients", "test"] = "clients"  # "test": test examples in their order
    rounds: tuple[Count, ...] = (1,)  # at whose start the updates are computed
    local_steps: Literal["unrolled", "pseudo-gradient"] = "unrolled"  # how FedAvg updates are attacked
    # What an attacker who unrolls them makes of the order of examples, which is not known: looks for it; supposes the
    # same in every epoch; takes the mean gradient of all examples in every step.
    step_order: Literal["searched", "same", "mean"] = "searched"
    attackers: Literal["both", "naive", "adaptive"] = "both"
    link: bool = True  # ask, too, whether updates can be linked to known examples: seconds, and no picture is needed
    member: bool = True  # suites ask, too, whether it can be told which examples were used
    nonmembers: Count = 1000  # held-out examples that those are told from, at most; of a model as many members
    auxiliary: str = HELD_OUT  # what attackers may learn from: every second held-out test example; none; a data set
    auxiliary_most: Count = 20_000  # auxiliary examples at most
    stop_when_settled: bool = True  # suites other than thorough leave out attacks on a question that is settled
    candidates: Count = 100  # the original and its distractors, from which an attacker picks
    reference: Literal["trained", "none"] = "trained"  # compare by a classifier of the task's own data, too
    lpips: Literal["none", "alex", "vgg"] = "none"  # needs weight files, see `fedveil.leakage.lpips`
    tolerance: Positive = (
        TOLERANCE  # of numbers in a table, in standard deviations of their column: within it, recovered
    )
    exposed_above: Probability = 0.5  # "exposed" where the whole interval of the share picked lies above this
    smallest_gain: NonNegative = 0.0  # by how much that share must beat the floor's to count as a leak
    rule_out: Probability = 0.25  # "no leakage found" only where a share this much above the floor's is ruled out
    recognizable_from: Probability = 0.5  # similarity from which on a picture that is picked counts as recognizable
    large_drop: Probability = 0.05  # a loss of accuracy surely above this is called large

    @field_validator("auxiliary")
    @classmethod
    def _known(cls, value: str) -> str:
        """A data set by its name; Python files of the user's own are looked for, not run, and found from any folder."""
        if value in (HELD_OUT, NONE):
            return value
        try:
            if is_reference(value):
                return str(Reference.read(value))
            datasets.parse(value)
        except FedveilError as error:
            raise ValueError(f"auxiliary is neither {HELD_OUT} nor {NONE}: {error}") from None
        return value

    @property
    def tools(self) -> dict[str, str]:
        """What examples are compared by, as a modality takes it."""
        return {"reference": self.reference, "lpips": self.lpips, "tolerance": str(self.tolerance)}
