"""The public settings that a capture tells beside the update. They may come from anybody: all are checked."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from fedveil.errors import FedveilError
from fedveil.fields import NonNegative, Positive, problems

Length = Annotated[int, Field(ge=1, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# A tuple of Python's serves as well as a list from JSON; what is in it is checked strictly.
Lengths = Annotated[list[Length], Field(strict=False, max_length=8)]
Means = Annotated[list[Finite], Field(strict=False, min_length=1)]
Stds = Annotated[list[Positive], Field(strict=False, min_length=1)]


class PublicFacts(BaseModel):
    """What fedveil writes and reads. None is required, and there may be others."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    model: Any = None  # its name, or an object with its name and fields
    loss: str | None = None
    shape: Lengths | None = None  # of one input
    classes: Length | None = None
    mean: Means | None = None  # of the normalization: one per channel
    std: Stds | None = None
    defense: str | None = None
    local_epochs: Length | None = None
    weight_decay: NonNegative | None = None
    buffers: Literal["shared", "local", "recalibrated"] | None = None

    @classmethod
    def of(cls, facts: Any) -> Self:
        """The facts of a capture, or one line that says what is wrong with them."""
        try:
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise FedveilError("facts must be what JSON can hold, without NaN and infinity") from None
        try:
            return cls.model_validate(facts)
        except pydantic.ValidationError as error:
            raise FedveilError(f"among its facts, {problems(error)}") from None
        except OverflowError:  # an integer that no float can hold
            raise FedveilError("one of its facts is too large a number") from None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.model, str | dict | None):
            raise ValueError(f"model must be a name, or an object with a name (got {self.model!r:.80})")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std must be given together")
        if self.mean is not None and self.std is not None and len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must be of equally many channels (got {len(self.mean)}, {len(self.std)})")
        if self.mean is not None and self.shape is not None and len(self.mean) not in self.shape[:1]:
            raise ValueError(f"mean and std are of {len(self.mean)} channels, but an input's shape is {self.shape}")
        if self.shape is not None and math.prod(self.shape) >= 2**40:
            raise ValueError(f"shape is of more numbers than any input has (got {self.shape})")
        return self
