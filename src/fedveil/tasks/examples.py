"""One part of a data set (training, validation or test), read batch by batch."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedveil.errors import FedveilError
from fedveil.tasks.arrays import as_label, as_tensors
from fedveil.tasks.fingerprint import Fingerprint
from fedveil.tasks.image_files import ImageFiles
from fedveil.tasks.inputs import Inputs, count, leaves, map_inputs, take
from fedveil.tasks.normalization import Normalization

KEPT = 2**28  # bytes of pictures that are kept after they were read from files


class Examples(ABC):
    """A list of (input, label) pairs. `batch` gives some of them as the model takes them.

    Labels are class numbers; where an example has any number of labels, a row of zeros and ones says which; of running
    text they are the tokens themselves.
    A subset is a view: it holds the places of its examples in the source, not the examples.
    """

    labels: Tensor  # int64, shape (N,), or float32 zeros and ones, shape (N, L), or int64 tokens, shape (N, length)
    source_sha256: str  # of the source's whole contents, also for a subset

    def __init__(self, labels: Tensor) -> None:
        self._source_labels = self.labels = labels
        self._rows = torch.arange(len(labels))  # places in the source

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def multi_label(self) -> bool:
        """Whether an example has any number of labels."""
        return self.labels.dim() == 2 and self.labels.is_floating_point()

    @property
    def next_tokens(self) -> bool:
        """Whether the targets are tokens, each to be foretold from those before it."""
        return self.labels.dim() == 2 and not self.labels.is_floating_point()

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Inputs, Tensor]:
        """Model inputs and targets (`labels`) of the examples at these places."""
        places = torch.as_tensor(indices, dtype=torch.int64)
        return self._read(self._rows[places]), self.labels[places]

    def batches(self, size: int = 256) -> Iterator[tuple[Inputs, Tensor]]:
        """All examples in order, `size` at a time; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """The examples at these places, in that order."""
        made = copy.copy(self)  # shares the source, whose checks and hash are done
        made._rows = self._rows[torch.as_tensor(indices, dtype=torch.int64)]
        made.labels = self._source_labels[made._rows]
        return made

    @abstractmethod
    def _read(self, rows: Tensor) -> Inputs:
        """The inputs at these places of the source."""


class ArrayExamples(Examples):
    """Examples held in memory, in the type they came in, and converted when a batch is read.

    uint8 means pixels 0 to 255 and becomes float32 in [0, 1]. Floating values become float32; with a normalization
    they are pixels in [0, 1]. Other integers (token numbers) are left as they are. The normalization is applied last.
    """

    def __init__(self, inputs: Inputs, labels: Tensor, normalization: Normalization | None = None) -> None:
        if count(inputs) != len(labels):
            raise FedveilError(f"{count(inputs)} inputs but {len(labels)} labels: there must be one label per input")
        if normalization is not None and not isinstance(inputs, Tensor):
            raise FedveilError("a normalization needs inputs that are one tensor of images, not named parts")
        for name, tensor in leaves(inputs).items():
            _check_values(name, tensor, pixels=normalization is not None)
        super().__init__(labels)
        self._inputs = inputs
        self._normalization = normalization
        total = Fingerprint()
        for name, tensor in leaves(inputs).items():
            total.add(name or "inputs", tensor)
        total.add("labels", labels)
        self.source_sha256 = total.hexdigest()

    def _read(self, rows: Tensor) -> Inputs:
        inputs = map_inputs(_model_values, take(self._inputs, rows))
        if self._normalization is not None and isinstance(inputs, Tensor):
            return self._normalization.normalize(inputs)
        return inputs


class FileExamples(Examples):
    """Examples whose pictures stay on disk. The first that are read are kept in memory, up to `KEPT` bytes."""

    def __init__(self, images: ImageFiles, labels: Tensor, normalization: Normalization) -> None:
        super().__init__(labels)
        self._images = images
        self._normalization = normalization
        self._kept: dict[int, Tensor] = {}  # shared with all subsets
        self._room = KEPT // (images.channels * images.size**2)
        total = Fingerprint()
        total.add("files", torch.tensor(list(bytes.fromhex(images.sha256())), dtype=torch.uint8))
        total.add("labels", labels)
        self.source_sha256 = total.hexdigest()

    def _read(self, rows: Tensor) -> Inputs:
        if not len(rows):
            return torch.empty(0, *self._images.shape[1:])
        pixels = torch.stack([self._picture(place) for place in rows.tolist()])
        return self._normalization.normalize(_model_values(pixels))

    def _picture(self, place: int) -> Tensor:
        found = self._kept.get(place)
        if found is None:
            found = torch.from_numpy(self._images.read(place).copy())
            if len(self._kept) < self._room:
                self._kept[place] = found
        return found


class DatasetExamples(Examples):
    """Examples of a map-style torch `Dataset` whose items are (input, label).

    Every item is read once at the start, for its label, to check it, and for the hash; only the labels are kept.
    The inputs are taken as the data set gives them: its own transforms have normalized them.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        size = _length(dataset)
        labels = torch.empty(size, dtype=torch.int64)
        total = Fingerprint()
        first: Inputs | None = None
        for place in range(size):
            inputs, label = self._item(place)
            first = inputs if first is None else first
            if _layout(inputs) != _layout(first):
                raise FedveilError(
                    f"example {place} of the data has shape {_layout(inputs)}, the first has {_layout(first)}: "
                    "all must be equal to form batches"
                )
            for name, tensor in leaves(inputs).items():
                _check_values(name, tensor, pixels=False, place=place)
                total.add(name or "input", tensor)
            labels[place] = label
        total.add("labels", labels)
        self.source_sha256 = total.hexdigest()
        super().__init__(labels)

    def _item(self, place: int) -> tuple[Inputs, int]:
        try:
            item = self._dataset[place]
        except Exception as error:  # a user's data set may raise anything
            raise FedveilError(f"reading example {place} of the data failed: {one_line(error)}") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise FedveilError(f"example {place} of the data is {type(item).__name__}, expected a pair (input, label)")
        return as_tensors(item[0], f"the input of example {place}"), as_label(item[1], place)

    def _read(self, rows: Tensor) -> Inputs:
        items = [self._item(place)[0] for place in rows.tolist()]
        if not items:
            raise FedveilError("an empty batch: give at least one index")
        if isinstance(items[0], Tensor):
            return _model_values(torch.stack([leaves(item)[None] for item in items]))
        return {name: _model_values(torch.stack([leaves(item)[name] for item in items])) for name in items[0]}


def one_line(error: BaseException) -> str:
    """An exception as its type and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _model_values(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:
        return tensor.float() / 255
    return tensor.float() if tensor.is_floating_point() else tensor


def _check_values(name: str | None, tensor: Tensor, *, pixels: bool, place: int | None = None) -> None:
    where = f" '{name}'" if name else ""
    at = "" if place is None else f" at example {place}"
    if tensor.is_floating_point():
        if not torch.isfinite(tensor).all():
            raise FedveilError(f"the inputs{where} contain NaN or infinity{at}: remove or fill them first")
        if pixels and tensor.numel() and (tensor.min() < 0 or tensor.max() > 1):
            raise FedveilError(
                f"floating images to be normalized must be pixels in [0, 1], got {tensor.min():g} to {tensor.max():g}"
            )
    elif pixels and tensor.dtype != torch.uint8:
        raise FedveilError(f"images to be normalized must be uint8, or floating in [0, 1], not {tensor.dtype}")


def _length(dataset: Dataset[Any]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]  # Dataset itself declares no length
    except (TypeError, NotImplementedError):
        raise FedveilError(
            f"{type(dataset).__name__} has no length: give a map-style data set, with __len__ and __getitem__"
        ) from None


def _layout(inputs: Inputs) -> object:
    shapes = {name: tuple(tensor.shape) for name, tensor in leaves(inputs).items()}
    return shapes.get(None, shapes)
