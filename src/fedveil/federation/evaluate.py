"""How good the model is, and the statistics it is judged with."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.clients.engine import Tensors
from fedveil.clients.identity import identity
from fedveil.clients.packages import Package, Wanted, packaged
from fedveil.federation.history import Utility
from fedveil.tasks.auroc import auroc_by_example
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs, as_arguments, count, map_inputs
from fedveil.tasks.measures import MetricName, measure, metric_of
from fedveil.tasks.regression import predicted, variance
from fedveil.tasks.task import Task
from fedveil.tasks.tokens import next_token_hits, next_token_losses

BATCH = 256
TOKENS = 1024  # of running text at a time: every one has a score for each entry of the vocabulary
TRAINING = 1000  # so many training examples at most, evenly spread, tell how well the model fits them
RECALIBRATION = 1024  # so many validation examples at most re-estimate the statistics


class Evaluator:
    """Runs a copy of the task's model in evaluation mode with any weights.

    compiled: whether whole batches go through compiled code, where the model has a form that can be kept.
    """

    def __init__(self, task: Task, device: torch.device | str = "cpu", *, compiled: bool = False) -> None:
        self._task = task
        self._device = device
        self._compiled = compiled
        self._packages: dict[int, Package | None] = {}  # by the size of batches
        self._model = copy.deepcopy(task.model).to(device).eval()
        some = min(len(task.train), TRAINING)
        self._training = task.train.subset(torch.arange(some) * len(task.train) // some)

    def utility(self, params: Tensors, buffers: Tensors) -> Utility:
        """On the validation part, the test part and a sample of the training part; `values` says by what."""
        test = self._judged(self._task.test, params, buffers)
        return Utility(
            metric=self._metric,
            validation=self._of(self._judged(self._task.validation, params, buffers)),
            test=self._of(test),
            train=self._of(self._judged(self._training, params, buffers)),
            others=test.others,
        )

    def test_value(self, params: Tensors, buffers: Tensors) -> float | None:
        """The same on the test part alone."""
        return self._of(self._judged(self._task.test, params, buffers))

    def values(self, examples: Examples | None, params: Tensors, buffers: Tensors) -> Tensor | None:
        """One value for every example, whose mean tells the utility; None where there is nothing to judge by.

        Whether its class is the highest score. With several labels, what it adds to the area under the ROC curve; of
        numbers, the squared error; of a piece of running text, the loss of its next tokens (see `Measure.of_mean`).
        """
        return self._judged(examples, params, buffers).values

    @property
    def _metric(self) -> MetricName:
        return metric_of(self._task.target.kind)

    def _of(self, judged: _Judged) -> float | None:
        return None if judged.values is None else measure(self._metric).of_mean(float(judged.values.double().mean()))

    def _judged(self, examples: Examples | None, params: Tensors, buffers: Tensors) -> _Judged:
        if examples is None:
            return _Judged()
        pairs = self._scores(examples, params, buffers)
        if examples.next_tokens:
            return _running(pairs)
        if examples.target.kind == "class":
            classes = self._task.classes is not None
            return _classes(pairs, text=examples.text is not None) if classes else _Judged()
        scores, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        if scores.numel() != targets.numel():
            return _Judged()  # outputs of another form, of which only the loss knows what they mean
        return _several(scores, targets) if examples.multi_label else _numbers(scores, targets)

    def _scores(self, examples: Examples, params: Tensors, buffers: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's scores and the targets, batch by batch: a language model's would not fit into memory at once."""
        size = max(1, TOKENS // examples.labels.shape[1]) if examples.next_tokens else BATCH
        with torch.no_grad():
            for inputs, targets in examples.batches(size):
                on_device = map_inputs(lambda tensor: tensor.to(self._device), inputs)
                package = self._package(params, buffers, on_device) if len(targets) == size else None
                yield (package or self._scored)(params, buffers, on_device).cpu(), targets

    def _scored(self, params: Tensors, buffers: Tensors, inputs: Inputs) -> Any:
        arguments, keywords = as_arguments(inputs)
        return functional_call(self._model, (params, buffers), arguments, keywords)

    def _package(self, params: Tensors, buffers: Tensors, inputs: Inputs) -> Package | None:
        size = count(inputs)
        if self._compiled and size not in self._packages:
            arguments = (params, buffers, inputs)
            own = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
            given = {name: tensor for name, tensor in own.items() if name in params or name in buffers}
            wanted = Wanted(
                name="evaluation",
                function=self._scored,
                arguments=arguments,
                identity=identity([self._model], given),
                expected=lambda: self._scored(*arguments),
            )
            self._packages[size] = packaged(wanted)
        return self._packages.get(size)

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
        some = min(len(self._task.validation), RECALIBRATION)
        with torch.no_grad():
            for inputs, targets in self._task.validation.subset(range(some)).batches(BATCH):
                if len(targets) < 2 < some:
                    continue  # one example has no variance
                arguments, keywords = as_arguments(map_inputs(lambda tensor: tensor.to(self._device), inputs))
                functional_call(model, (params, fresh), arguments, keywords)  # moves `fresh` in place
        return fresh


@dataclass(frozen=True, eq=False)
class _Judged:
    """One value for every example, and other measures of them all."""

    values: Tensor | None = None
    others: dict[str, float] = field(default_factory=dict)


def _classes(pairs: Iterable[tuple[Tensor, Tensor]], *, text: bool) -> _Judged:
    """Classes; those of sentences also by Matthews' correlation, as is usual for them."""
    found, right = (torch.cat(each) for each in zip(*((scores.argmax(1), true) for scores, true in pairs), strict=True))
    if not text:
        return _Judged(found == right)
    from sklearn.metrics import matthews_corrcoef  # takes a while to import

    return _Judged(found == right, {"MCC": float(matthews_corrcoef(right.numpy(), found.numpy()))})


def _running(pairs: Iterable[tuple[Tensor, Tensor]]) -> _Judged:
    """Running text: of every piece its share of the loss, so that the mean is that of all next tokens."""
    losses, counts, hits = [], [], []
    for scores, targets in pairs:
        lost, counted = next_token_losses(scores, targets)
        losses.append(lost)
        counts.append(counted)
        hits.append(next_token_hits(scores, targets))
    count = torch.cat(counts).double()
    return _Judged(torch.cat(losses).double() / count.mean(), {"accuracy": float(torch.cat(hits).double().mean())})


def _several(scores: Tensor, targets: Tensor) -> _Judged:
    """Several labels. The accuracy is the share of labels that a score above 0, a chance of one half, gets right."""
    scores = scores.reshape(targets.shape)
    right = (scores > 0) == (targets > 0.5)
    return _Judged(auroc_by_example(scores, targets), {"accuracy": float(right.double().mean())})


def _numbers(output: Tensor, targets: Tensor) -> _Judged:
    off = (predicted(output, targets) - targets).double().reshape(len(targets), -1)
    others = {"mean absolute error": float(off.abs().mean())}
    spread = variance(targets)
    if spread > 0:
        others["R²"] = 1 - float(off.square().mean()) / spread
    return _Judged(off.square().mean(1), others)
