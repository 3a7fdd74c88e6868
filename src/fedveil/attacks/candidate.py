"""What a matching attack moves: variables that decode to candidate inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from torch import Tensor

from fedveil.streams import Streams

if TYPE_CHECKING:
    from fedveil.attacks.problem import Problem

Variables = dict[str, Tensor]
Learned = dict[str, Tensor]  # what an attack learned before it saw a victim: the same tensors for all victims


class Found(NamedTuple):
    """What the phase before came to. The first axis of every tensor is the victim."""

    inputs: Tensor  # (V, B, ...)
    variables: Variables


class Candidate(Protocol):
    """Variables of every victim, stacked, that stand for its inputs: pixels, or whatever decodes to inputs."""

    def start(self, problem: Problem, streams: Streams, found: Found | None = None) -> Variables:
        """Where the search begins: tensors whose first axis is the victim. `found`: go on from there."""
        ...

    def decode(self, variables: Variables, learned: Learned) -> Tensor:
        """The inputs (B, ...) that ONE victim's variables stand for: a pure function that `vmap` can stack."""
        ...

    def cost(self, variables: Variables) -> Tensor | None:
        """What ONE victim's variables cost by themselves, beside the match and the priors on inputs; None: nothing."""
        ...

    def project(self, variables: Variables, problem: Problem) -> None:
        """Bring variables that left the valid range back to it, in place."""
        ...


@dataclass(frozen=True)
class Pixels:
    """The inputs themselves."""

    begin: Literal["normal", "uniform"] = "normal"  # uniform: over the valid range
    boxed: bool = True  # whether inputs are clamped to the valid range

    def start(self, problem: Problem, streams: Streams, found: Found | None = None) -> Variables:
        """Noise of the inputs' shape, or what was found."""
        if found is not None:
            return {"inputs": found.inputs.detach().clone()}
        shape, like = (problem.batch_size, *problem.shape), problem.like
        if self.begin == "normal" or problem.box is None:
            return {"inputs": streams.normal(*shape).to(like)}
        low, high = problem.box
        return {"inputs": low + (high - low) * streams.uniform(*shape).to(like)}

    def decode(self, variables: Variables, learned: Learned) -> Tensor:
        """As they are."""
        return variables["inputs"]

    def cost(self, variables: Variables) -> Tensor | None:
        """Nothing."""
        return None

    def project(self, variables: Variables, problem: Problem) -> None:
        """Clamp to valid pixels."""
        if self.boxed and problem.box is not None:
            variables["inputs"].clamp_(*problem.box)


def held(tensor: Tensor) -> Tensor:
    """A variable without slope: no optimizer moves it. It stays part of the graph, which plain autograd asks for."""
    return tensor.detach() + 0 * tensor
