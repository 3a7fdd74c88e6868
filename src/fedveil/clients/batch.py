"""`ClientBatch`: one step of K clients with equal batch sizes, as a defense sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from fedveil.clients.engine import Engine
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, leaf, with_leaf
from fedveil.tree import Tree


@dataclass(frozen=True)
class StepResult:
    """What a step of K clients yields."""

    update: Tree  # what is sent
    buffers: Tree  # the model's buffers after the step
    loss: Tensor  # (K,)
    # The inputs the gradient was taken at. They stay on the client, are used to score the perturbed input
    # only, and never get into a capture.
    seen: Inputs


@dataclass
class ClientBatch:
    """K clients with a batch each: every tensor's first axis is the client.

    `gradient`, `input_gradient`, `example_gradients`, `clipped_sum`, `loss`, `evaluation_loss`, `features` and
    `sensitivity` may be called as often as a method needs and move nothing; `share` computes the one gradient that goes
    out, and only there do buffers (batch norm statistics) move. `state` is a defense's own memory for these clients,
    such as a perturbation that is carried over the batches of a round.
    """

    engine: Engine
    params: Tree
    buffers: Tree
    inputs: Inputs
    targets: Tensor
    streams: Streams
    state: dict[str, Tensor] = field(default_factory=dict)
    validation: ClientBatch | None = None
    planned: Tensor | None = None  # (K,): the sizes that the protocol planned, where a defense draws random ones
    _calls: int = 0

    @property
    def count(self) -> int:
        """The number of clients K."""
        return len(self.targets)

    @property
    def perturbed(self) -> Tensor:
        """The leaf of the inputs that a defense may perturb: shape (K, B, ...)."""
        return leaf(self.inputs, self.engine.perturb)

    def with_perturbed(self, value: Tensor) -> Inputs:
        """The inputs with that leaf replaced."""
        return with_leaf(self.inputs, self.engine.perturb, value)

    def at(self, place: int, state: dict[str, Tensor]) -> ClientBatch:
        """The same batch for the defense at a place of a chain: with its own streams and its own state."""
        return replace(self, streams=self.streams.fold("place", place), state=state, _calls=0)

    def gradient(self, inputs: Inputs | None = None, params: Tree | None = None) -> Tree:
        """Each client's gradient at its weights (or others) and inputs (or others)."""
        return self.engine.gradient(*self._arguments(inputs, params)).update

    def share(self, inputs: Inputs | None = None, params: Tree | None = None) -> StepResult:
        """The gradient that goes out, with the buffers it moved."""
        result = self.engine.gradient(*self._arguments(inputs, params))
        seen = self.inputs if inputs is None else inputs
        return StepResult(result.update, result.buffers, result.loss, seen)

    def input_gradient(self, inputs: Inputs | None = None, params: Tree | None = None) -> Tensor:
        """The gradient of each client's loss in its inputs: shape (K, B, ...)."""
        return self.engine.input_gradient(*self._arguments(inputs, params))[0]

    def example_gradients(self, inputs: Inputs | None = None, params: Tree | None = None) -> Tree:
        """The gradient of every example on its own: tensors of shape (K, B, ...)."""
        return self.engine.example_gradients(*self._arguments(inputs, params))

    def clipped_sum(self, bound: float) -> tuple[Tree, Tensor]:
        """The sum of each client's example gradients, each scaled down to a norm of `bound`, and the mean losses."""
        return self.engine.clipped_sum(bound, *self._arguments(None, None))

    def loss(self, inputs: Inputs | None = None, params: Tree | None = None) -> Tensor:
        """Each client's mean loss: shape (K,)."""
        return self.engine.loss(*self._arguments(inputs, params))

    def evaluation_loss(self, params: Tree | None = None) -> Tensor:
        """Each client's mean loss in evaluation mode (no dropout, running statistics of batch norm): shape (K,)."""
        return self.engine.evaluation_loss(*self._arguments(None, params))

    def features(self, layer: str, inputs: Inputs | None = None) -> Tensor:
        """The output of a named layer for every example: shape (K, B, ...)."""
        return self.engine.features(layer, *self._arguments(inputs, None))

    def sensitivity(self, layer: str, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen features (K, m) that a named layer takes in, and ‖∂feature/∂input‖: both of shape (K, B, m)."""
        params, buffers, inputs, _, streams = self._arguments(None, None)
        return self.engine.sensitivity(layer, chosen, params, buffers, inputs, streams)

    def _arguments(self, inputs: Inputs | None, params: Tree | None) -> tuple[Tree, Tree, Inputs, Tensor, Streams]:
        # Every pass through the model draws its dropout masks anew, as it would in a plain training loop.
        self._calls += 1
        streams = self.streams.fold("model", self._calls)
        chosen = self.inputs if inputs is None else inputs
        return params or self.params, self.buffers, chosen, self.targets, streams
