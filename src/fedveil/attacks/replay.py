"""What a client would have sent of given examples: its round, done again by the attacker with own random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, cycle, islice

import torch
from torch import Tensor
from torch.func import functional_call

from fedveil.attacks.scene import Public
from fedveil.attacks.without_dropout import DropoutOff, without_dropout
from fedveil.clients.batch import ClientBatch
from fedveil.clients.choose import why_not_stacked
from fedveil.clients.engine import Backend, Engine
from fedveil.clients.sgd import at_rest, sgd_step
from fedveil.defenses.base import StepsBefore, SummedStep
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, as_arguments, leaf, leaves, map_inputs, take
from fedveil.tree import Tree, size_in_bytes

MOST_BYTES = 16 * 2**20  # of updates that are made at a time: comparing them takes several times as much


class Replay:
    """The local round of one kind of client, ready to run on any examples.

    like: one update, whose settings and whose starting point the replays have. sample: one batch (B, ...) with its
    labels. The attacker's model has no dropout, as the victim's masks are not known; batch norm is as in training.
    """

    def __init__(self, public: Public, like: Updates, sample: tuple[Inputs, Tensor], backend: Backend = "auto") -> None:
        if len(sample[1]) != like.examples:
            raise FedveilError(f"a candidate has {len(sample[1])} examples, but an update here is of {like.examples}")
        self.like = like
        model = without_dropout(public.model)
        perturb = _perturbable(sample[0])
        params, buffers = like.before.row(0), like.buffers.row(0)
        self.exact = not _draws(public.model, params, buffers, sample[0])  # a model that draws is not done again
        drawing = not self.exact and _draws(model, params, buffers, sample[0])
        self._context: type[AbstractContextManager[object]] = DropoutOff if drawing else nullcontext
        self._engine = Engine(model, public.loss, backend="stacked", perturb=perturb)
        with self._context():
            # One large model at a time is as fast on the loop. Nothing is timed: the choice must not vary.
            alone = backend == "loop" or self._engine.chunk == 1
            if alone or (backend == "auto" and why_not_stacked(model, public.loss, sample, perturb) is not None):
                self._engine = Engine(model, public.loss, backend="loop", perturb=perturb)

    def of(self, like: Updates) -> Replay:
        """The same for another update of the same model."""
        made = copy.copy(self)
        made.like = like
        return made

    def at_once(self, chain: Chain) -> int:
        """How many updates to make at a time, so that they fit into memory."""
        size = size_in_bytes(self.like.before.row(0).values())
        single = any(isinstance(defense, SummedStep) for defense in chain.defenses)  # it takes each example's gradient
        return max(1, MOST_BYTES // max(size * (self.like.examples if single else 1), 1))

    def messages(
        self, chain: Chain, inputs: Inputs, labels: Tensor, streams: Streams, first: StepsBefore | None = None
    ) -> Tree:
        """What clients with these batches (K, B, ...) would send under a chain, drawing from streams of K rows.

        first: local steps that each gradient was taken after, for a chain without the defense that made them.
        """
        like, states = self.like, chain.new_states()
        start = Tree.expand(like.before.row(0), len(labels))
        params, buffers = start, Tree.expand(like.buffers.row(0), len(labels))
        velocity = at_rest(start, like.momentum)
        update, batch = start, None
        with self._context():
            for step, (lr, part) in enumerate(zip(like.lr, self._walk(), strict=True)):
                data = _columns(inputs, part), labels[:, part]
                batch = ClientBatch(self._engine, params, buffers, *data, streams.fold("step", step))
                done = chain.step(_moved(batch, first), states)
                update = done.update
                if like.kind != "gradient":
                    moved, velocity = sgd_step(
                        params, update, velocity, lr=lr, momentum=like.momentum, weight_decay=like.weight_decay
                    )
                    params, buffers = Tree(moved), done.buffers
                    batch = replace(batch, params=params, buffers=buffers, streams=streams.fold("upload"))
            assert batch is not None
            if like.kind != "gradient":
                update = params if like.kind == "weights" else params - start
            return chain.upload(update, batch, states)

    def gradients(
        self,
        chain: Chain,
        inputs: Inputs,
        labels: Tensor,
        streams: Streams,
        first: StepsBefore | None = None,
        *,
        bare: bool = False,
    ) -> Tree:
        """The gradient of the first step on all examples, after the chain's gradient defenses.

        bare: as it is before whoever owns the step adds its noise, and before any gradient defense.
        """
        count, states = len(labels), chain.new_states()
        start = Tree.expand(self.like.before.row(0), count)
        buffers = Tree.expand(self.like.buffers.row(0), count)
        with self._context():
            batch = _moved(ClientBatch(self._engine, start, buffers, inputs, labels, streams.fold("step", 0)), first)
            if bare:
                return chain.part(batch, states)[1].update / labels.shape[1]
            return chain.step(batch, states).update

    def moved(self, chain: Chain, inputs: Inputs, labels: Tensor, streams: Streams) -> Tensor:
        """Where, to first order, a chain's data defenses have the gradients of K batches (K, B, ...) taken.

        Of sentences it is by how much embeddings are moved.
        """
        count = len(labels)
        start = Tree.expand(self.like.before.row(0), count)
        buffers = Tree.expand(self.like.buffers.row(0), count)
        with self._context():
            batch = ClientBatch(self._engine, start, buffers, inputs, labels, streams.fold("step", 0))
            return leaf(chain.moved(batch), self._engine.perturb)

    def _walk(self) -> Iterator[slice]:
        """The examples of each local step. Every epoch goes through them as they stand: their order is not known."""
        sizes = self.like.batch_sizes[: self.like.steps // self.like.local_epochs]
        ends = list(accumulate(sizes))
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return islice(cycle(parts), self.like.steps)


def shared_updates(
    public: Public, like: Updates, chain: Chain, inputs: Inputs, labels: Tensor, streams: Streams
) -> Tree:
    """What clients with these batches (K, B, ...) would send: see `Replay`, which does it more than once."""
    replay = Replay(public, like, (take(inputs, 0), labels[0]))
    step = replay.at_once(chain)
    parts = [slice(start, start + step) for start in range(0, len(labels), step)]
    return Tree.concat([replay.messages(chain, take(inputs, p), labels[p], streams.rows(p)) for p in parts])


def _columns(inputs: Inputs, part: slice) -> Inputs:
    """Some examples of every client."""
    return map_inputs(lambda tensor: tensor[:, part], inputs)


def _moved(batch: ClientBatch, first: StepsBefore | None) -> ClientBatch:
    """The batch at the weights that some plain steps on it lead to."""
    if first is None:
        return batch
    weights = batch.params
    for _ in range(first.steps):
        weights = weights - batch.gradient(params=weights) * first.lr
    return replace(batch, params=weights)


def _perturbable(inputs: Inputs) -> str | None:
    """The part of the inputs that a data defense may have changed: real numbers."""
    return next((name for name, tensor in leaves(inputs).items() if tensor.is_floating_point()), None)


def _draws(model: torch.nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Inputs) -> bool:
    """Whether the model draws random numbers in a forward pass; torch's generator is left as it was."""
    arguments, keywords = as_arguments(inputs)
    kept = {name: buffer.clone() for name, buffer in buffers.items()}  # batch norm moves them
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        functional_call(model, (params, kept), arguments, keywords)
        return not torch.equal(before, torch.get_rng_state())
