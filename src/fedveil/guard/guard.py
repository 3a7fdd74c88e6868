"""`Guard`: a defense in anyone's own training loop, one line in place of `loss.backward()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.clients.engine import Engine, Gradients, Loss
from fedveil.clients.passes import Parts
from fedveil.defenses.accumulation import Accumulation
from fedveil.defenses.base import Defense, MessageKind
from fedveil.defenses.chain import Chain, States
from fedveil.defenses.guarantee import exposure_of
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.guard.attached import Attachment, check_alone, check_holds, gradient_of, put
from fedveil.guard.checks import check_acting, check_cleared, check_settings, check_size
from fedveil.guard.last import Last, versions
from fedveil.guard.own_batches import check_batch, mean_loss
from fedveil.guard.precision import callers_precision, sound
from fedveil.intake import Intake
from fedveil.ledger.ledger import Ledger, Release
from fedveil.ledger.statement import Statement
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, map_inputs
from fedveil.tree import Tree


class Guard:
    """Protects the gradients of one client's own training loop.

    ```python
    guard = fedveil.Guard(model, torch.nn.functional.cross_entropy, fedveil.defenses.GradientDropout())
    for x, y in loader:
        optimizer.zero_grad()
        guard.backward(x, y)  # fills .grad with the protected gradient
        optimizer.step()
    ```

    The loss is the mean over a batch. Noise is drawn from the operating system's entropy unless a `seed` is given (for
    experiments only); clients of one seed need a `client` number each, or they would draw the same noise. A defense
    that protects the upload and not the gradient is applied by `upload`. `spent` tells what all releases so far have
    spent, `capture` what a server sees of the last one. docs/guard.md has the rest.

    - `batch_size`: the planned size, for a defense that needs batches of random size (DP-SGD).
    - `dataset_size`: how many examples those batches are drawn from: DP-SGD's ε depends on it.
    - `scaler`: the `torch.amp.GradScaler` that the loop uses, if any.
    - `perturb`: the part of named inputs that a data defense changes.
    - `validation`: inputs and targets of the client's own, for a defense that needs some.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        defense: Defense | Chain | Sequence[Defense] | str | None,
        *,
        seed: int | None = None,
        client: int = 0,
        batch_size: int | None = None,
        dataset_size: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        perturb: str | None = None,
        validation: tuple[Inputs, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.chain = Chain.of(defense)
        self._trained = Parts.of(model).trained  # as it was found at the last step
        check_settings(self.chain, self._trained, batch_size, dataset_size)
        # Plain autograd serves a user's own module, which need not support vmap. The module itself is run, so that
        # whatever changes in it counts.
        self._engine = Engine(model, mean_loss(loss), backend="loop", chunk=1, perturb=perturb, own=True)
        self._streams = Streams.secure([client]) if seed is None else Streams.seeded(seed, [client], "guard")
        self._client = client
        self._planned = batch_size
        self._dataset_size = dataset_size
        delta = min(1e-5, 1 / (dataset_size or 1))
        self.ledger = Ledger(exposure_of(self._trained, seeded=seed is not None, delta=delta))
        rate = batch_size / dataset_size if batch_size and dataset_size else 1.0
        self._gradient = Release(self.chain, uploads=0, example_rate=rate)  # what every step releases
        self._scaler = scaler
        self._states = self.chain.new_states()
        self._validation = validation
        self._round = 0
        self._step = 0
        self._sum: Accumulation | None = None  # of the scope that is open
        self._attached: Attachment | None = None
        self._written: dict[str, TensorWeakRef] = {}  # what `.grad` was given last
        self._data: tuple[Inputs, Tensor] | None = None  # of the last step, for upload defenses that look at it
        self._sizes: list[int] = []  # of the batches of this round
        self._last: Last | None = None
        self._before = self._weights()

    def __repr__(self) -> str:
        return f"Guard({type(self.model).__name__}, {self.chain if self.chain.defenses else 'no defense'})"

    def backward(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Add the protected gradient of a batch to every parameter's `.grad`, and return the loss.

        Buffers move as in a plain forward pass. A defense that acts on the upload alone is refused here: train as
        usual and send what `upload` returns. Inside `accumulate`, `.grad` is filled at the end of the scope.
        """
        self._check_acting()
        self._check_batch(inputs, targets)
        self._look()
        self._data = (inputs, targets)
        if self._sum is not None:
            return self._add(self._sum, self._client_batch(inputs, targets))
        check_cleared(self.chain, self._trained, self._written)
        self._step += 1
        states = [dict(state) for state in self._states]
        with self._as_around():
            shared = self._shared(inputs, targets, states)
            self._write(shared.update, len(targets), shared.loss)
        self._move_buffers(shared)
        self._states = states
        return shared.loss[0]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A scope in which every `backward` takes a micro-batch of one step; the step is protected once, at the end.

        ```python
        optimizer.zero_grad()
        with guard.accumulate():
            for x, y in micro_batches:
                guard.backward(x, y)  # the mean loss of the micro-batch, not divided by their number
        optimizer.step()
        ```

        `.grad` then has what `backward` of all examples in one batch would have given (a data defense works on each
        micro-batch by itself, and so do batch norm and dropout). If anything fails inside, `.grad` stays as it was.
        """
        self._check_acting()
        self._check_no_scope()
        self._look()
        check_cleared(self.chain, self._trained, self._written)
        self._step += 1
        nothing = torch.empty(0, device=self._device)
        self._sum = whole = Accumulation(
            self.chain, [dict(state) for state in self._states], self._client_batch(nothing, nothing)
        )
        try:
            yield
            if not whole.size and not self.chain.random_sizes:
                raise FedveilError("accumulate() ended without a batch: call backward inside it")
            self._check_size(whole.size)
            with self._as_around():
                self._write(whole.protected(), whole.size)
            self._states = whole.states
        finally:
            self._sum = None

    def attach(self, optimizer: torch.optim.Optimizer, *, for_capture: bool = False) -> Attachment:
        """Protect `.grad` whenever this optimizer is about to step, in a loop that calls `loss.backward()` itself.

        ```python
        guard = fedveil.Guard(model, None, "clip:norm=1+gaussian-noise:sigma=0.01")
        attached = guard.attach(optimizer)
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()  # protects .grad first
        attached.remove()
        ```

        A defense that needs the data or the gradient of each example is refused. What cannot be protected raises
        before the step. for_capture: keep the weights before each step, so that `capture` can be called after it.
        """
        self._check_acting()
        check_alone(self.chain)
        self._look()
        attached = Attachment(optimizer, lambda: self._protect_grad(attached.optimizer, for_capture))
        try:
            check_holds(attached.optimizer, self._trained)
        except FedveilError:
            attached.remove()
            raise
        self._attached = attached
        return attached

    def upload(self, *, of: str = "weights") -> dict[str, Tensor]:
        """What the client sends at the end of a round: its weights, or their change since `new_round`, protected."""
        if of not in ("weights", "delta"):
            raise FedveilError(f"upload sends 'weights' or 'delta', not '{of}'")
        self._check_no_scope()
        kind: MessageKind = "weights" if of == "weights" else "delta"
        self.chain.check_message(kind)
        self._look()
        weights = self._weights()
        if of == "delta" and weights.keys() != self._before.keys():
            raise FedveilError("other parameters are trained than at the start of the round: call new_round() first")
        update = weights if of == "weights" else weights - self._before
        chain = Chain() if self._trained_bare(weights) else self.chain
        self._step += 1
        with self._as_around():
            protected = self._uploaded(update)
        wrong = Intake(weights.row(0)).refused(protected).get(0)
        if wrong:
            raise FedveilError(f"the protected update {wrong}: check the data and the loss")
        self.ledger.spend(self._client, Release(chain, gradients=0))
        self._last = Last(kind, protected, self._before, list(self._sizes), [])
        return protected.row(0)

    def new_round(self) -> None:
        """Tell that the model now holds the server's weights: memory that lasts a round starts afresh."""
        self._check_no_scope()
        self._look()
        self._round += 1
        self._step = 0
        self._before = self._weights()
        self._sizes = []
        for position, defense in enumerate(self.chain.defenses):
            if defense.state_scope == "round":
                self._states[position].clear()

    # ---- what went out ---------------------------------------------------------------------------------

    def spent(self, delta: float | None = None) -> Statement:
        """What all releases so far have spent together: every gradient of `backward` or `accumulate`, every upload.

        At δ, by default 1e-5, or one in `dataset_size` where that is less. `paragraph` says what is not covered.
        """
        if self.chain.random_sizes and self._dataset_size is None:
            raise FedveilError(
                f"the ε of {self.chain} depends on how likely an example is in a batch: give Guard dataset_size=, the "
                "number of examples that batches are drawn from"
            )
        return self.ledger.statement(delta)

    def capture(
        self,
        *,
        lr: float | Sequence[float] | None = None,
        momentum: float = 0.0,
        batch_sizes: Sequence[int] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Capture:
        """What a server sees of the last release: the gradient of the last step, or the last upload.

        A gradient is captured before the optimizer moves the weights. An upload needs the `lr` and `momentum` of the
        local steps, and their `batch_sizes` where `backward` was not used. `facts`: see `fedveil.capture`.
        """
        if self._last is None:
            raise FedveilError("nothing was released yet: call backward() or upload() first")
        self._look()
        told = {"defense": str(self.chain), "buffers": "local", **(facts or {})}
        seen = self._last.seen(self._trained, lr=lr, momentum=momentum, batch_sizes=batch_sizes, facts=told)
        return replace(seen, client=self._client, round=self._round + 1)

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on in another process: counters, the ledger, and memory that lasts over rounds."""
        kept = [
            {name: tensor.clone() for name, tensor in state.items()} if defense.state_scope == "run" else {}
            for defense, state in zip(self.chain.defenses, self._states, strict=True)
        ]
        counters = {"client": self._client, "round": self._round, "step": self._step, "sizes": list(self._sizes)}
        return {"chain": str(self.chain), **counters, "states": kept, "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if state["chain"] != str(self.chain):
            raise FedveilError(f"this state belongs to the defense {state['chain']}, not to {self.chain}")
        if state["client"] != self._client:
            raise FedveilError(f"this state belongs to client {state['client']}, not to client {self._client}")
        self._round, self._step = int(state["round"]), int(state["step"])
        self._sizes = list(state["sizes"])
        self._states = [dict(own) for own in state["states"]]
        self.ledger.load_state_dict(state["ledger"], known=[self.chain])

    # ---- a step ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See what the model consists of: its owner may have changed that since the last step."""
        self._trained = self._engine.look().trained

    @property
    def _device(self) -> torch.device:
        return next(iter(self._trained.values())).device

    def _client_batch(self, inputs: Inputs, targets: Tensor) -> ClientBatch:
        batch = ClientBatch(
            engine=self._engine,
            params=Tree.expand(self._engine.parts.weights, 1),
            buffers=Tree.expand({name: buffer.detach() for name, buffer in self._engine.parts.buffers.items()}, 1),
            inputs=map_inputs(lambda tensor: tensor[None], inputs),
            targets=targets[None],
            streams=self._streams.fold("round", self._round, "step", self._step),
            planned=None if self._planned is None else torch.tensor([self._planned], device=targets.device),
        )
        if self._validation is not None:
            held_out = map_inputs(lambda tensor: tensor[None], self._validation[0])
            own = batch.streams.fold("validation")
            batch.validation = replace(batch, inputs=held_out, targets=self._validation[1][None], streams=own)
        return batch

    def _shared(self, inputs: Inputs, targets: Tensor, states: States) -> Gradients | StepResult:
        """The protected gradient of a step."""
        plain = None if self.chain.acts_on_data else self._engine.gradient_at_home(inputs, targets)
        if plain is None:
            return self.chain.step(self._client_batch(inputs, targets), states)
        return self.chain.step_of(plain, self._client_batch(inputs, targets), states) if self.chain.defenses else plain

    def _protect_grad(self, optimizer: torch.optim.Optimizer, keep_weights: bool) -> None:
        """Replace what `.grad` holds by what the defense makes of it: `attach` has the optimizer call this."""
        self._look()
        check_holds(optimizer, self._trained)
        gradient = gradient_of(self._trained)
        if gradient is None:
            return
        self._step += 1
        states = [dict(state) for state in self._states]
        streams = self._streams.fold("round", self._round, "step", self._step)
        with torch.autocast(self._device.type, enabled=False):
            update = self.chain.gradient_alone(gradient, streams, states)
        wrong = Intake(self._trained).refused(update).get(0)
        if wrong:
            raise FedveilError(f"the protected gradient {wrong}: check the data and the loss")
        self.ledger.spend(self._client, self._gradient)  # first: nothing may go out uncounted
        self._sizes.append(0)  # of a batch that was not seen
        before = self._weights() if keep_weights else None
        self._last = Last("gradient", update, before, [0], versions(self._trained))
        self._states = states
        put(update.row(0), self._trained)

    def _uploaded(self, update: Tree) -> Tree:
        if self._data is not None:
            return self.chain.upload(update, self._client_batch(*self._data), self._states)
        streams = self._streams.fold("round", self._round, "step", self._step)
        return self.chain.upload_alone(update, streams, self._states)

    def _add(self, whole: Accumulation, batch: ClientBatch) -> Tensor:
        self._check_size(whole.size + batch.targets.shape[1])
        with self._as_around():
            shared = whole.add(batch)
        if sound("the gradient of the micro-batch", shared.update, shared.update.row(0), shared.loss, self._scaler):
            self._move_buffers(shared)
        return shared.loss[0]

    def _as_around(self) -> AbstractContextManager[None]:
        return callers_precision(self._engine, self._device.type, self._scaler)

    def _write(self, update: Tree, size: int, loss: Tensor | None = None) -> None:
        """Add a gradient to `.grad`, scaled as the scaler expects it; infinity tells the scaler to skip the step."""
        like = self._trained if self.chain.changes_gradient else None  # else autograd saw to the shapes
        finite = sound("the protected gradient", update, like, loss, self._scaler)
        # A skipped step counts too, since that it was skipped shows. Spend first: nothing may go out uncounted.
        self.ledger.spend(self._client, self._gradient)
        known = self._planned if self.chain.random_sizes and self._planned else max(size, 1)
        self._sizes.append(known)
        self._last = Last("gradient", update, None, [known], versions(self._trained)) if finite else None
        gradients = update.row(0) if finite else {}
        for name, parameter in self._trained.items():
            gradient = gradients[name] if finite else torch.full_like(parameter, torch.inf)
            if self._scaler is not None:
                gradient = self._scaler.scale(gradient)
            # A tensor of its own: what a defense or a module keeps must not move with it.
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        if self.chain.changes_gradient:
            self._written = {name: TensorWeakRef(p.grad) for name, p in self._trained.items() if p.grad is not None}

    def _move_buffers(self, shared: Gradients | StepResult) -> None:
        for name, buffer in self._engine.parts.buffers.items():
            buffer.data.copy_(shared.buffers[name][0])

    # ---- what is refused -------------------------------------------------------------------------------

    def _trained_bare(self, weights: Tree) -> bool:
        """Whether the weights moved in this round without any step that Guard protected, though it should have."""
        if self._sizes or all(defense.acts_at == "upload" for defense in self.chain.defenses):
            return False
        return weights.keys() != self._before.keys() or bool((weights - self._before).norm()[0] > 0)

    def _check_acting(self) -> None:
        check_acting(self.chain, attached=self._attached is not None and self._attached.active)

    def _check_no_scope(self) -> None:
        if self._sum is not None:
            raise FedveilError("accumulate() is still open: end its scope first")

    def _check_batch(self, inputs: Inputs, targets: Tensor) -> None:
        size = check_batch(inputs, targets)
        if not size and not self.chain.random_sizes:
            raise FedveilError("the batch has no examples: there is no gradient to protect")
        self._check_size(size)

    def _check_size(self, size: int) -> None:
        check_size(self.chain, size, self._planned)

    def _weights(self) -> Tree:
        return Tree({name: parameter.detach().clone()[None] for name, parameter in self._trained.items()})
