"""`Guard`: a defense in anyone's own training loop, one line in place of `loss.backward()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine, Loss
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, map_inputs
from fedveil.tree import Tree


class Guard:
    """Protects the gradients of one client's own training loop.

    ```python
    guard = fedveil.Guard(model, torch.nn.functional.cross_entropy, fedveil.GradientDropout())
    for x, y in loader:
        optimizer.zero_grad()
        guard.backward(x, y)  # fills .grad with the protected gradient
        optimizer.step()
    ```

    Noise is drawn from the operating system's entropy unless a `seed` is given (for experiments only). A defense
    that protects the upload and not the gradient is applied by `upload`. `validation`: inputs and targets of the
    client's own, for a defense that needs some.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        defense: Defense | Chain | Sequence[Defense] | str | None,
        *,
        seed: int | None = None,
        perturb: str | None = None,
        validation: tuple[Inputs, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.chain = Chain.of(defense)
        if self.chain.aggregates:
            raise FedveilError(f"{self.chain} acts on the server: there is nothing for a client to guard")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise FedveilError("the model has no parameters to train: there is no gradient to protect")
        # A module of the user's own is served by plain autograd: it need not be vmap's friend.
        self._engine = Engine(model, loss, backend="loop", chunk=1, perturb=perturb)
        self._streams = Streams.secure([0]) if seed is None else Streams.seeded(seed, [0], "guard")
        self._states = self.chain.new_states()
        self._validation = validation
        self._round = 0
        self._step = 0
        self._last: tuple[Inputs, Tensor] = (torch.empty(0), torch.empty(0))  # for defenses that look at the data
        self._before = self._weights()

    def __repr__(self) -> str:
        return f"Guard({type(self.model).__name__}, {self.chain if self.chain.defenses else 'no defense'})"

    def backward(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Add the protected gradient of a batch to every parameter's `.grad`, and return the loss.

        Buffers move as in a plain forward pass. A defense that acts on the upload alone is refused here: train as
        usual and send what `upload` returns.
        """
        acting = [defense for defense in self.chain.defenses if defense.acts_at != "upload"]
        if self.chain.defenses and not acting:
            raise FedveilError(f"{self.chain} protects the upload, not a gradient: train as usual and call upload()")
        self._last = (inputs, targets)
        shared = self.chain.step(self._client_batch(inputs, targets), self._states)
        if not (bool(shared.update.isfinite()[0]) and bool(shared.loss.isfinite()[0])):
            raise FedveilError(
                "the loss or the protected gradient is not finite (NaN or infinity): check the data and the loss"
            )
        for name, parameter in self._trained():
            gradient = shared.update[name][0]
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(shared.buffers[name][0])
        return shared.loss[0]

    def upload(self, *, of: str = "weights") -> dict[str, Tensor]:
        """What the client sends at the end of a round: its weights, or their change since `new_round`, protected."""
        if of not in ("weights", "delta"):
            raise FedveilError(f"upload sends 'weights' or 'delta', not '{of}'")
        self.chain.check_message("weights" if of == "weights" else "delta")
        weights = self._weights()
        update = weights if of == "weights" else weights - self._before
        protected = self.chain.upload(update, self._client_batch(*self._last), self._states)
        if not bool(protected.isfinite()[0]):
            raise FedveilError("the protected update is not finite (NaN or infinity): check the data and the loss")
        return protected.row(0)

    def new_round(self) -> None:
        """Tell that the model now holds the server's weights: memory that lasts a round starts afresh."""
        self._round += 1
        self._step = 0
        self._before = self._weights()
        for place, defense in enumerate(self.chain.defenses):
            if defense.state_scope == "round":
                self._states[place].clear()

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on in another process: counters, and memory that lasts over rounds."""
        kept = [
            {name: tensor.clone() for name, tensor in state.items()} if defense.state_scope == "run" else {}
            for defense, state in zip(self.chain.defenses, self._states, strict=True)
        ]
        return {"chain": str(self.chain), "round": self._round, "step": self._step, "states": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if state["chain"] != str(self.chain):
            raise FedveilError(f"this state belongs to the defense {state['chain']}, not to {self.chain}")
        self._round, self._step = int(state["round"]), int(state["step"])
        self._states = [dict(place) for place in state["states"]]

    def _client_batch(self, inputs: Inputs, targets: Tensor) -> ClientBatch:
        self._follow_model()
        self._step += 1
        buffers = Tree({name: buffer.detach()[None] for name, buffer in self.model.named_buffers()})
        batch = ClientBatch(
            engine=self._engine,
            params=self._weights(),
            buffers=buffers,
            inputs=map_inputs(lambda tensor: tensor[None], inputs),
            targets=targets[None],
            streams=self._streams.fold("round", self._round, "step", self._step),
        )
        if self._validation is not None:
            held_out = map_inputs(lambda tensor: tensor[None], self._validation[0])
            own = batch.streams.fold("validation")
            batch.validation = replace(batch, inputs=held_out, targets=self._validation[1][None], streams=own)
        return batch

    def _follow_model(self) -> None:
        """Give the engine's copy what is not passed to it at every call: modes of layers and frozen weights."""
        for name, module in self.model.named_modules():
            self._engine.model.get_submodule(name).training = module.training
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                self._engine.model.get_parameter(name).data = parameter.detach()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def _weights(self) -> Tree:
        return Tree({name: parameter.detach().clone()[None] for name, parameter in self._trained()})
