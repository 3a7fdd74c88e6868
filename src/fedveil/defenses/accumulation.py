"""Gradient accumulation: a step in micro-batches, protected once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.defenses.chain import Chain, States
from fedveil.errors import FedveilError
from fedveil.tasks.inputs import Inputs, leaves
from fedveil.tree import Tree


class Accumulation:
    """The sum over the examples of a step so far. `batch` is the step's, with its streams; it has no examples yet."""

    def __init__(self, chain: Chain, states: States, batch: ClientBatch) -> None:
        chain.check_adds_up()
        self.chain = chain
        self.states = states
        self.size = 0
        self._batch = batch
        self._total = batch.params.map(_zeros)
        self._parts: list[ClientBatch] = []

    def add(self, batch: ClientBatch) -> StepResult:
        """Add a micro-batch. Of the result, use the loss and the buffers only: the rest is not protected yet."""
        # The first micro-batch draws what a whole batch would draw; the others need draws of their own.
        number = len(self._parts)
        own = batch.streams.fold("part", number) if number else batch.streams
        part, shared = self.chain.part(replace(batch, streams=own), self.states)
        self._total = self._total.combine(shared.update, torch.add)
        self._parts.append(part)
        self.size += batch.targets.shape[1]
        return shared

    def protected(self) -> Tree:
        """The protected gradient of all micro-batches together."""
        update = self.chain.whole(self._total, self.size, self._whole_batch(), self.states)
        return update.combine(self._batch.params, lambda gradient, like: gradient.to(like.dtype))

    def _whole_batch(self) -> ClientBatch:
        if not self._parts:
            return self._batch
        if len(self._parts) == 1 or not self.chain.reads_data:
            return replace(self._parts[-1], streams=self._batch.streams)
        try:
            inputs = _joined([part.inputs for part in self._parts])
            targets = torch.cat([part.targets for part in self._parts], dim=1)
        except RuntimeError:
            raise FedveilError(
                f"{self.chain} looks at all examples of a step, and these micro-batches differ in shape: pad them alike"
            ) from None
        return replace(self._parts[-1], inputs=inputs, targets=targets, streams=self._batch.streams)


def _zeros(like: Tensor) -> Tensor:
    """The zero that a sum starts from, in float32 for half precision, which would lose small terms or overflow."""
    short = like.dtype in (torch.float16, torch.bfloat16)
    return torch.zeros_like(like, dtype=torch.float32 if short else like.dtype)


def _joined(parts: list[Inputs]) -> Inputs:
    named = [leaves(part) for part in parts]
    joined = {name: torch.cat([part[name] for part in named], dim=1) for name in named[0]}
    return joined[None] if None in joined else {str(name): tensor for name, tensor in joined.items()}
