"""`Rules`: what may leave a client, and how it is protected."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, Self

import pydantic
from pydantic import Field

from fedveil.defenses.base import Defense, MessageKind
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.fields import Positive, declared
from fedveil.intake import LONGEST

NUM_EXAMPLES = "num-examples"
RUNNING = ("*running_mean", "*running_var", "*num_batches_tracked")  # what torch's batch norm keeps
# The settings of a run (`context.run_config`) that `protect` reads, and the field that each sets.
RUN_KEYS = {"defense": "chain", "protect-of": "of", "protect-buffers": "buffers", "protect-metrics": "metrics"}


@declared
class Rules:
    """What may leave a client with a reply, and how it is protected. All else is dropped or refused.

    Arrays whose names match `buffer_names` are buffers, not weights. No defense acts on them, so by default the server
    gets back the ones that it sent.

    >>> Rules(chain=Chain.of("spm:epsilon=1")).kind
    'weights'
    >>> Rules(chain=Chain.of("gradient-dropout:at=upload")).kind
    'delta'
    """

    chain: pydantic.InstanceOf[Chain] = Chain()
    # What the defense acts on: the weights, their change in this round, or a gradient that is sent in their place.
    # Unless it is given: weights for a method of the upload (SPM), their change for one of the gradient.
    of: Literal["weights", "delta", "gradient"] | None = None
    buffers: Literal["withhold", "share"] = "withhold"  # "share": as they are, and undefended
    buffer_names: tuple[str, ...] = RUNNING  # patterns
    metrics: tuple[str, ...] = (NUM_EXAMPLES,)  # single numbers that may go along
    digits: int = Field(default=3, ge=1, le=17)  # significant ones of such a number, if it is not whole
    longest: Positive = LONGEST  # norm of a protected update

    @cached_property
    def kind(self) -> MessageKind:
        """What the defense acts on."""
        if self.of is not None:
            return self.of
        native = all(type(defense).place == "upload" for defense in self.chain.defenses)
        return "weights" if native else "delta"

    def is_buffer(self, name: str) -> bool:
        """Whether an array of this name is a buffer."""
        return any(fnmatchcase(name, pattern) for pattern in self.buffer_names)

    @property
    def early(self) -> tuple[Defense, ...]:
        """The defenses that must act before there is anything to send: on the data, or on the gradient of a step."""
        acting = ("gradient", "upload") if self.kind == "gradient" else ("upload",)
        return tuple(defense for defense in self.chain.defenses if defense.acts_at not in acting)

    @classmethod
    def settle(cls, fixed: Mapping[str, Any], run_config: Mapping[str, Any]) -> Self:
        """The rules of a run: those that the code fixes, and for the rest what the run's settings say.

        A run that says otherwise than the code is refused: the server would count on another defense.
        """
        told = {RUN_KEYS[key]: _read(key, value) for key, value in run_config.items() if key in RUN_KEYS}
        if "chain" not in {**told, **fixed}:
            raise FedveilError('no defense is set: give protect() one, or the run a setting defense = "..."')
        for key, name in RUN_KEYS.items():
            if name in told and name in fixed and _spelled(told[name]) != _spelled(fixed[name]):
                raise FedveilError(
                    f'the run asks for {key} = "{_spelled(told[name])}", but this client is fixed to '
                    f'"{_spelled(fixed[name])}": leave it out of the run\'s settings'
                )
        return cls(**{**told, **fixed})


def _read(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        raise FedveilError(f"the run's setting {key} must be a text (got {value!r:.80})")
    if key == "defense":
        return Chain.of(value)
    return tuple(name.strip() for name in value.split(",") if name.strip()) if key == "protect-metrics" else value


def _spelled(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
