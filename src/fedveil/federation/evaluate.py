"""How good the model is, and the statistics it is judged with."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.clients.engine import Tensors
from fedveil.federation.history import Utility
from fedveil.tasks.auroc import auroc
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import as_arguments, map_inputs
from fedveil.tasks.task import Task
from fedveil.tasks.tokens import next_token_hits

BATCH = 256
TOKENS = 1024  # of running text at a time: every one has a score for each entry of the vocabulary
RECALIBRATION = 1024  # so many validation examples at most re-estimate the statistics


class Evaluator:
    """Runs a copy of the task's model in evaluation mode with any weights."""

    def __init__(self, task: Task, device: torch.device | str = "cpu") -> None:
        self._task = task
        self._device = device
        self._model = copy.deepcopy(task.model).to(device).eval()

    def utility(self, params: Tensors, buffers: Tensors) -> Utility:
        """Accuracy on the validation and the test part; with several labels per example, the area under the ROC.

        The accuracy of a language model is the share of next tokens that it scores highest.
        """
        return Utility(
            metric="AUROC" if self._task.labels is not None else "accuracy",
            validation=self._value(self._task.validation, params, buffers),
            test=self._value(self._task.test, params, buffers),
        )

    def test_value(self, params: Tensors, buffers: Tensors) -> float | None:
        """The same on the test part alone."""
        return self._value(self._task.test, params, buffers)

    def _value(self, examples: Examples | None, params: Tensors, buffers: Tensors) -> float | None:
        if examples is not None and self._task.labels is not None:
            scores, targets = zip(*self._scores(examples, params, buffers), strict=True)
            return auroc(torch.cat(scores), torch.cat(targets))
        return _share(self.correct(examples, params, buffers))

    def correct(self, examples: Examples | None, params: Tensors, buffers: Tensors) -> Tensor | None:
        """For every example whether its class is the highest score, and of running text for every next token.

        None where there are no classes, no next tokens, or no examples.
        """
        if examples is None or (self._task.classes is None and not examples.next_tokens):
            return None
        hits = next_token_hits if examples.next_tokens else _hits
        return torch.cat([hits(*pair) for pair in self._scores(examples, params, buffers)])

    def _scores(self, examples: Examples, params: Tensors, buffers: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's scores and the targets, batch by batch: a language model's would not fit into memory at once."""
        size = max(1, TOKENS // examples.labels.shape[1]) if examples.next_tokens else BATCH
        with torch.no_grad():
            for inputs, targets in examples.batches(size):
                arguments, keywords = as_arguments(map_inputs(lambda tensor: tensor.to(self._device), inputs))
                yield functional_call(self._model, (params, buffers), arguments, keywords).cpu(), targets

    def recalibrated(self, params: Tensors, buffers: Tensors) -> Tensors:
        """Batch norm statistics estimated anew from validation data, as the plain mean over its batches.

        Only batch norm layers are in training mode here, so that nothing is drawn. Other buffers are left alone.
        """
        fresh = {name: buffer.clone() for name, buffer in buffers.items()}
        model = copy.deepcopy(self._model)
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.train()
                module.momentum = None  # torch's word for a cumulative mean
                prefix = f"{name}." if name else ""
                fresh[f"{prefix}running_mean"].zero_()
                fresh[f"{prefix}running_var"].fill_(1)
                fresh[f"{prefix}num_batches_tracked"].zero_()
        if self._task.validation is None or not any(module.training for module in model.modules()):
            return fresh
        count = min(len(self._task.validation), RECALIBRATION)
        with torch.no_grad():
            for inputs, targets in self._task.validation.subset(range(count)).batches(BATCH):
                if len(targets) < 2 < count:
                    continue  # one example has no variance
                arguments, keywords = as_arguments(map_inputs(lambda tensor: tensor.to(self._device), inputs))
                functional_call(model, (params, fresh), arguments, keywords)  # moves `fresh` in place
        return fresh


def _hits(scores: Tensor, targets: Tensor) -> Tensor:
    return scores.argmax(1) == targets


def _share(correct: Tensor | None) -> float | None:
    return None if correct is None else float(correct.double().mean())
