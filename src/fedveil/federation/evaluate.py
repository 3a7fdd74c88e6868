"""How good the model is, and the statistics it is judged with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.clients.engine import Tensors
from fedveil.clients.identity import identity
from fedveil.clients.packages import Package, Wanted, packaged
from fedveil.federation.history import Utility
from fedveil.tasks.auroc import auroc_by_example
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs, as_arguments, count, leaves, map_inputs
from fedveil.tasks.measures import MetricName, measure, metric_of
from fedveil.tasks.regression import predicted, variance
from fedveil.tasks.task import Task
from fedveil.tasks.tokens import next_token_hits, next_token_losses

BATCH = 256
TOKENS = 1024  # of running text at a time: every one has a score for each entry of the vocabulary
TRAINING = 1000  # so many training examples at most, evenly spread, tell how well the model fits them
READY_BYTES = 2**26  # so much of what is judged again and again stays in memory as the model takes it
RECALIBRATION = 1024  # so many validation examples at most re-estimate the statistics

Part = Literal["test", "validation", "training"]
Found = tuple[Tensor, ...]  # of a batch: what it is judged by, or scores and targets
Elsewhere = Callable[[tuple[Part, ...], Tensors, Tensors], list[list[Found]]]


class Evaluator:
    """Runs a copy of the task's model in evaluation mode with any weights.

    compiled: whether whole batches go through compiled code, where the model has a form that can be kept.
    elsewhere: what evaluates in worker processes instead.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device | str = "cpu",
        *,
        compiled: bool = False,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._task = task
        self._device = device
        self._compiled = compiled
        self._elsewhere = elsewhere
        self._packages: dict[int, Package | None] = {}  # by the size of batches
        self._model = copy.deepcopy(task.model).to(device).eval()
        some = min(len(task.train), TRAINING)
        training = task.train.subset(torch.arange(some) * len(task.train) // some)
        self._parts: dict[Part, Examples | None] = {
            "test": task.test,
            "validation": task.validation,
            "training": training,
        }
        # Batches that were read, as many as fit, and how often they had been written to: a model may do so.
        self._ready: dict[tuple[Part, int], tuple[tuple[Inputs, Tensor], list[int]]] = {}
        self._room = READY_BYTES

    def utility(self, params: Tensors, buffers: Tensors) -> Utility:
        """On the test part, the validation part and a sample of the training part; see `values`."""
        test, validation, training = self._judged(("test", "validation", "training"), params, buffers)
        return Utility(
            metric=self._metric,
            validation=self._of(validation),
            test=self._of(test),
            train=self._of(training),
            others=test.others,
        )

    def test_value(self, params: Tensors, buffers: Tensors) -> float | None:
        """The same on the test part alone."""
        return self._of(self._judged(("test",), params, buffers)[0])

    def values(self, params: Tensors, buffers: Tensors) -> Tensor | None:
        """One value for every test example, whose mean tells the utility; None where there is nothing to judge by.

        Whether its class is the highest score. With several labels, what it adds to the area under the ROC curve; of
        numbers, the squared error; of a piece of running text, the loss of its next tokens (see `Measure.of_mean`).
        """
        return self._judged(("test",), params, buffers)[0].values

    @property
    def _metric(self) -> MetricName:
        return metric_of(self._task.target.kind)

    def _of(self, judged: _Judged) -> float | None:
        return None if judged.values is None else measure(self._metric).of_mean(float(judged.values.double().mean()))

    def _judged(self, parts: tuple[Part, ...], params: Tensors, buffers: Tensors) -> list[_Judged]:
        found = (self._elsewhere or self.batches)(parts, params, buffers)
        return [self._together(self._parts[part], own) for part, own in zip(parts, found, strict=True)]

    def _together(self, examples: Examples | None, found: list[Found]) -> _Judged:
        """All batches of a part."""
        if examples is None or not found:
            return _Judged()
        columns = [torch.cat(each) for each in zip(*found, strict=True)]
        if examples.next_tokens:
            return _running(*columns)
        if examples.target.kind == "class":
            return _classes(*columns, text=examples.text is not None)
        scores, targets = columns
        if scores.numel() != targets.numel():
            return _Judged()  # outputs of another form, of which only the loss knows what they mean
        return _several(scores, targets) if examples.multi_label else _numbers(scores, targets)

    def batches(
        self, parts: tuple[Part, ...], params: Tensors, buffers: Tensors, first: int = 0, step: int = 1
    ) -> list[list[Found]]:
        """What each part is judged by, batch by batch, every `step`-th from the first on.

        Scores are judged at once where that can be: those of a language model would not fit into memory.
        """
        return [self._batches(part, params, buffers, first, step) for part in parts]

    def _batches(self, part: Part, params: Tensors, buffers: Tensors, first: int, step: int) -> list[Found]:
        examples = self._parts[part]
        if examples is None or (examples.target.kind == "class" and self._task.classes is None):
            return []
        size = max(1, TOKENS // examples.labels.shape[1]) if examples.next_tokens else BATCH
        found: list[Found] = []
        with torch.no_grad():
            for start in range(first * size, len(examples), step * size):
                inputs, targets = self._read(part, range(start, min(start + size, len(examples))))
                package = self._package(params, buffers, inputs) if len(targets) == size else None
                scores = (package or self._scored)(params, buffers, inputs).cpu()
                if examples.next_tokens:
                    found.append((*next_token_losses(scores, targets), next_token_hits(scores, targets)))
                elif examples.target.kind == "class":
                    found.append((scores.argmax(1), targets))
                else:
                    found.append((scores, targets))
        return found

    def _read(self, part: Part, indices: range) -> tuple[Inputs, Tensor]:
        """A batch on the device: read once, as long as there is room for it."""
        key, examples = (part, indices.start), self._parts[part]
        assert examples is not None
        batch, written = self._ready.get(key, (None, []))
        if batch is not None and _written(batch[0]) == written:
            return batch
        inputs, targets = examples.batch(indices)
        fresh = map_inputs(lambda tensor: tensor.to(self._device), inputs), targets
        taken = 0 if batch else sum(tensor.nbytes for tensor in leaves(inputs).values())
        if taken <= self._room:
            self._room -= taken
            self._ready[key] = fresh, _written(fresh[0])
        return fresh

    def keep_compiled(self, params: Tensors, buffers: Tensors) -> None:
        """Load the compiled code for whole batches, or make it."""
        whole = next((part for part, of in self._parts.items() if of is not None and len(of) >= BATCH), None)
        if whole is not None and self._compiled:
            self._package(params, buffers, self._read(whole, range(BATCH))[0])

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


def _classes(found: Tensor, right: Tensor, *, text: bool) -> _Judged:
    """Classes; those of sentences also by Matthews' correlation, as is usual for them."""
    if not text:
        return _Judged(found == right)
    from sklearn.metrics import matthews_corrcoef  # takes a while to import

    return _Judged(found == right, {"MCC": float(matthews_corrcoef(right.numpy(), found.numpy()))})


def _running(losses: Tensor, counts: Tensor, hits: Tensor) -> _Judged:
    """Running text: of every piece its share of the loss, so that the mean is that of all next tokens."""
    return _Judged(losses.double() / counts.double().mean(), {"accuracy": float(hits.double().mean())})


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


def _written(inputs: Inputs) -> list[int]:
    """How often each tensor was written to since it was made."""
    return [tensor._version for tensor in leaves(inputs).values()]
