"""One part of a data set (training, validation or test), read batch by batch."""

from __future__ import annotations

import copy
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedveil.errors import FedveilError, one_line
from fedveil.tasks.arrays import are_labels, as_label, as_tensors, join_labels
from fedveil.tasks.columns import Columns
from fedveil.tasks.fingerprint import Fingerprint
from fedveil.tasks.image_files import ImageFiles
from fedveil.tasks.inputs import Inputs, count, leaves, map_inputs, take
from fedveil.tasks.normalization import Normalization, PixelRange
from fedveil.tasks.text_form import TextForm

logger = logging.getLogger(__name__)

KEPT = 2**28  # bytes of pictures from files that are kept in memory


@dataclass(frozen=True)
class TargetForm:
    """What one target looks like: a class number, a row of labels or tokens, or numbers to predict."""

    kind: Literal["class", "labels", "numbers", "tokens"] = "class"
    shape: tuple[int, ...] = ()

    def zeros(self, *leading: int, device: torch.device | str = "cpu") -> Tensor:
        """Targets of this form that say nothing."""
        floating = self.kind in ("labels", "numbers")
        return torch.zeros((*leading, *self.shape), dtype=torch.float32 if floating else torch.int64, device=device)


class Examples(ABC):
    """A list of (input, label) pairs. `batch` gives some of them as the model takes them.

    Labels are class numbers, or rows of zeros and ones if an example can have several labels, or numbers to predict,
    or, for running text, the tokens themselves. A subset is a view: it holds the indices of its examples in the source,
    not the examples.

    A batch is converted when it is read. uint8 means pixels 0 to 255 and becomes floating in [0, 1]. Floating values
    become the `dtype` of the model. Other integers (token numbers) are left as they are. A normalization comes last.
    """

    # int64 classes (N,), float32 zeros and ones (N, L), float32 numbers (N,) or (N, T), or int64 tokens (N, length)
    labels: Tensor
    source_sha256: str  # of the source's whole contents, even for a subset
    dtype: torch.dtype = torch.float32  # of floating inputs and targets
    columns: Columns | None = None  # of a table, and how its numbers are standardized
    text: TextForm | None = None  # of sentences

    def __init__(self, labels: Tensor, normalization: Normalization | None = None) -> None:
        self._source_labels = self.labels = labels
        self._labeled = are_labels(labels)  # of the whole source: a few numbers of a subset may happen to be 0 and 1
        self._rows = torch.arange(len(labels))  # indices in the source
        self._normalization = normalization  # of pixels; None if the inputs need none

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def multi_label(self) -> bool:
        """Whether an example can have several labels, or none."""
        return self._labeled

    @property
    def numbers(self) -> bool:
        """Whether the targets are numbers to predict, as in regression."""
        return self.labels.is_floating_point() and not self._labeled

    @property
    def next_tokens(self) -> bool:
        """Whether the targets are tokens, each to be predicted from those before it."""
        return self.labels.dim() == 2 and not self.labels.is_floating_point()

    @property
    def target(self) -> TargetForm:
        """What one target looks like."""
        kind: Literal["class", "labels", "numbers", "tokens"] = "class"
        if self.multi_label or self.numbers:
            kind = "labels" if self.multi_label else "numbers"
        elif self.next_tokens:
            kind = "tokens"
        return TargetForm(kind, tuple(self.labels.shape[1:]))

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Inputs, Tensor]:
        """Model inputs and targets (`labels`) of the examples at these indices."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        targets = self.labels[chosen]
        inputs = map_inputs(self._model_values, self._read(self._rows[chosen]))
        return inputs, targets.to(self.dtype) if targets.is_floating_point() else targets

    def batches(self, size: int = 256) -> Iterator[tuple[Inputs, Tensor]]:
        """All examples in order, `size` at a time; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """The examples at these indices, in that order."""
        made = copy.copy(self)  # shares the source, whose checks and hash are done
        made._rows = self._rows[torch.as_tensor(indices, dtype=torch.int64)]
        made.labels = self._source_labels[made._rows]
        return made

    def as_type(self, dtype: torch.dtype) -> Self:
        """The same examples for a model of this floating type."""
        made = copy.copy(self)
        made.dtype = dtype
        return made

    def with_columns(self, columns: Columns) -> Self:
        """The same rows of a table, standardized by other columns."""
        made = copy.copy(self)
        made.columns = columns
        return made

    @abstractmethod
    def _read(self, rows: Tensor) -> Inputs:
        """The inputs at these indices of the source, as they are stored."""

    def _model_values(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
            return tensor
        values = tensor.to(torch.promote_types(self.dtype, torch.float32))  # only the result is in half precision
        if tensor.dtype == torch.uint8:
            values = values / 255
        if self._normalization is not None:
            values = self._normalization.normalize(values)
        return values.to(self.dtype)


class ArrayExamples(Examples):
    """Examples held in memory, in their original type."""

    def __init__(
        self,
        inputs: Inputs,
        labels: Tensor,
        normalization: Normalization | None = None,
        *,
        normalized: bool = False,
    ) -> None:
        if count(inputs) != len(labels):
            raise FedveilError(f"{count(inputs)} inputs but {len(labels)} labels: there must be one label per input")
        pixels = PixelRange(normalization, normalized=normalized)
        for name, tensor in leaves(inputs).items():
            _check_values(name, tensor)
        pixels.add(inputs)
        pixels.check()
        super().__init__(labels, None if normalized else normalization)
        self._inputs = inputs
        total = Fingerprint()
        for name, tensor in leaves(inputs).items():
            total.add(name or "inputs", tensor)
        total.add("labels", labels)
        self.source_sha256 = total.hexdigest()

    def _read(self, rows: Tensor) -> Inputs:
        return take(self._inputs, rows)


class FileExamples(Examples):
    """Examples whose pictures stay on disk. The first that are read are kept in memory, up to `KEPT` bytes."""

    def __init__(self, images: ImageFiles, labels: Tensor, normalization: Normalization) -> None:
        super().__init__(labels, normalization)
        self._images = images
        self._kept: dict[int, Tensor] = {}  # shared with all subsets
        self._room = KEPT // (images.channels * images.size**2)
        total = Fingerprint()
        total.add("files", torch.tensor(list(bytes.fromhex(images.sha256())), dtype=torch.uint8))
        total.add("labels", labels)
        self.source_sha256 = total.hexdigest()

    def _read(self, rows: Tensor) -> Inputs:
        if not len(rows):
            return torch.empty(0, *self._images.shape[1:], dtype=torch.uint8)
        return torch.stack([self._picture(index) for index in rows.tolist()])

    def _picture(self, index: int) -> Tensor:
        found = self._kept.get(index)
        if found is None:
            found = torch.from_numpy(self._images.read(index).copy())
            if len(self._kept) < self._room:
                self._kept[index] = found
        return found


class DatasetExamples(Examples):
    """Examples of a map-style torch `Dataset` whose items are (input, label).

    Every item is read once at the start, for its label, its hash and a check; only the labels are kept. The first item
    is read twice, to see whether it stays the same. Without a normalization, inputs are used as they are.
    """

    def __init__(
        self, dataset: Dataset[Any], normalization: Normalization | None = None, *, normalized: bool = False
    ) -> None:
        self._dataset = dataset
        pixels = PixelRange(normalization, normalized=normalized)
        labels = []
        total = Fingerprint()
        first: object = None
        for index in range(_length(dataset)):
            inputs, label = self._item(index)
            first = _layout(inputs) if first is None else first
            if _layout(inputs) != first:
                raise FedveilError(
                    f"example {index} of the data has {_layout(inputs)}, the first has {first}: "
                    "all must be equal to form batches"
                )
            for name, tensor in leaves(inputs).items():
                _check_values(name, tensor, index=index)
                total.add(name or "input", tensor)
            pixels.add(map_inputs(lambda tensor: tensor[None], inputs))
            labels.append(label)
        pixels.check()
        self._check_steady()
        joined = join_labels(labels)
        total.add("labels", joined)
        self.source_sha256 = total.hexdigest()
        super().__init__(joined, None if normalized else normalization)

    def _check_steady(self) -> None:
        if _length(self._dataset):
            once, again = (leaves(self._item(0)[0]) for _ in range(2))
            if not all(again[name].equal(tensor) for name, tensor in once.items()):
                logger.warning(
                    "the data give another input each time they are read: remove random transforms such as flips and "
                    "crops, so that a run can be repeated and resumed"
                )

    def _item(self, index: int) -> tuple[Inputs, int | Tensor]:
        try:
            item = self._dataset[index]
        except Exception as error:  # a user's data set may raise anything
            raise FedveilError(f"reading example {index} of the data failed: {one_line(error, typed=True)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            shown = f"{len(item)} things" if isinstance(item, tuple | list) else type(item).__name__
            raise FedveilError(f"example {index} of the data is {shown}, expected a pair (input, label)")
        return as_tensors(item[0], f"the input of example {index}"), as_label(item[1], index)

    def _read(self, rows: Tensor) -> Inputs:
        items = [self._item(index)[0] for index in rows.tolist()]
        if not items:
            raise FedveilError("an empty batch: give at least one index")
        if isinstance(items[0], Tensor):
            return torch.stack([leaves(item)[None] for item in items])
        return {name: torch.stack([leaves(item)[name] for item in items]) for name in items[0]}


class JoinedExamples(Examples):
    """The examples of several sets, one set after another."""

    def __init__(self, sets: Sequence[Examples]) -> None:
        super().__init__(torch.cat([each.labels for each in sets]))
        self._sets = list(sets)
        self.columns, self.text = sets[0].columns, sets[0].text
        self._ends = torch.tensor([len(each) for each in sets]).cumsum(0)
        self.source_sha256 = hashlib.sha256(" ".join(each.source_sha256 for each in sets).encode()).hexdigest()

    def as_type(self, dtype: torch.dtype) -> Self:
        made = super().as_type(dtype)
        made._sets = [each.as_type(dtype) for each in self._sets]
        return made

    def with_columns(self, columns: Columns) -> Self:
        made = super().with_columns(columns)
        made._sets = [each.with_columns(columns) for each in self._sets]
        return made

    def _read(self, rows: Tensor) -> Inputs:
        whose = torch.bucketize(rows, self._ends, right=True)
        indices: list[Tensor] = []
        found: list[dict[str | None, Tensor]] = []
        for number in sorted(set(whose.tolist())):
            mine = (whose == number).nonzero().flatten()
            start = self._ends[number] - len(self._sets[number])
            indices.append(mine)
            found.append(leaves(self._sets[number].batch(rows[mine] - start)[0]))
        back = torch.cat(indices).argsort()
        joined = {name: torch.cat([each[name] for each in found])[back] for name in found[0]}
        return joined[None] if None in joined else {str(name): tensor for name, tensor in joined.items()}

    def _model_values(self, tensor: Tensor) -> Tensor:
        return tensor  # already converted by its own set


def _check_values(name: str | None, tensor: Tensor, index: int | None = None) -> None:
    where = f" '{name}'" if name else ""
    at = "" if index is None else f" at example {index}"
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise FedveilError(f"the inputs{where} contain NaN or infinity{at}: remove or fill them first")


def _length(dataset: Dataset[Any]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]  # Dataset itself declares no length
    except (TypeError, NotImplementedError):
        raise FedveilError(
            f"{type(dataset).__name__} has no length: give a map-style data set, with __len__ and __getitem__"
        ) from None


def _layout(inputs: Inputs) -> str:
    shapes = ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in leaves(inputs).items())
    return ", ".join(f"{name + ' ' if name else ''}shape {shape} {dtype}" for name, shape, dtype in shapes)
