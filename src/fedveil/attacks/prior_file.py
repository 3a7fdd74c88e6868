"""A trained generator with what it was trained on: in memory, and as a file.

The file is in the safetensors format, with the tensors of `generator.shapes_of` under their names, all in single
precision, and a JSON header (`PriorHeader`) that says what the generator was trained on. Nothing in it is ever run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import Field
from torch import Tensor

from fedveil.attacks.candidate import Learned
from fedveil.attacks.generator import (
    GeneratorSettings,
    as_pixels,
    check_shape,
    evenly_spread,
    shapes_of,
    trained,
)
from fedveil.errors import FedveilError
from fedveil.progress import Report
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tasks.normalization import Normalization
from fedveil.tensorfile import Header, read_tensors, seal, write_tensors
from fedveil.version import __version__

FORMAT = "fedveil-prior"
VERSION = 1
_Side = Annotated[int, Field(ge=1, le=4096)]
_Count = Annotated[int, Field(ge=1, le=2**40)]
_Words = Annotated[str, Field(max_length=200)]


class PriorHeader(Header):
    """What a generator was trained on, and how."""

    format: str = FORMAT
    version: int = VERSION
    data: _Words  # the name of the data set: "mnist"
    part: _Words  # of it: "training images"
    pictures: _Count  # used
    content: _Words  # the SHA-256 of these pictures and their labels
    shape: tuple[_Side, _Side, _Side]  # of a picture: channels, height, width
    mean: tuple[float, ...] | None = None  # of the normalization under which they were read; null where there is none
    std: tuple[float, ...] | None = None
    classes: Annotated[int, Field(ge=1, le=2**20)]
    latents: Annotated[int, Field(ge=1, le=2**16)]
    epochs: _Count
    seed: Annotated[int, Field(ge=0)]
    held_out: Annotated[float, Field(allow_inf_nan=False)]  # see `Trained.held_out`
    fedveil: _Words = __version__  # that trained it

    @property
    def words(self) -> str:
        """What it was trained on: "20,000 training images of mnist"."""
        return f"{self.pictures:,} {self.part} of {self.data}"

    @property
    def normalization(self) -> Normalization | None:
        """That of the pictures."""
        return None if self.mean is None or self.std is None else Normalization(self.mean, self.std)


@dataclass(frozen=True, eq=False)
class Prior:
    """A trained generator, and what it was trained on.

    >>> import fedveil as fv
    >>> from fedveil.attacks.generator import GeneratorSettings
    >>> digits = fv.task("digits").train.subset(range(100))
    >>> prior = Prior.train(digits, "digits", settings=GeneratorSettings(latents=8, epochs=1))
    >>> prior.header.words
    '100 training images of digits'
    """

    header: PriorHeader
    weights: Learned  # see `generator.shapes_of`

    def __post_init__(self) -> None:
        expected = shapes_of(self.header.shape, self.header.latents, self.header.classes)
        if sorted(expected) != sorted(self.weights):
            odd = sorted(expected.keys() ^ self.weights.keys())
            raise FedveilError(f"a generator of these settings has other tensors: {', '.join(odd)[:100]}")
        for name, tensor in self.weights.items():
            form, right = (tensor.dtype, tuple(tensor.shape)), (torch.float32, expected[name])
            if form != right:
                raise FedveilError(f"{name} is {form[0]} of shape {form[1]}, expected {right[0]} of shape {right[1]}")
            if not torch.isfinite(tensor).all():
                raise FedveilError(f"{name} contains NaN or infinity")

    @classmethod
    def train(
        cls,
        examples: Examples,
        data: str,
        *,
        part: str = "training images",
        normalization: Normalization | None = None,
        settings: GeneratorSettings | None = None,
        seed: int = 0,
        classes: int | None = None,
        report: Report | None = None,
    ) -> Self:
        """Train a generator on examples of a data set; the same examples and seed give the same one.

        normalization: that the examples are read under; without it, their own range stands for the valid one.
        """
        settings = settings or GeneratorSettings()
        inputs, labels = examples.batch(evenly_spread(len(examples), settings.most))
        if not isinstance(inputs, Tensor) or labels.dim() != 1:
            raise FedveilError("a generator learns from pictures with one class each")
        check_shape(tuple(inputs.shape[1:]))
        box = None if normalization is None else normalization.box()
        classes = classes or int(labels.max()) + 1
        found = trained(as_pixels(inputs, box), labels, classes, settings, Streams.seeded(seed, [0], "prior"), report)
        header = PriorHeader(
            data=data,
            part=part,
            pictures=len(labels),
            content=fingerprint([("x", inputs), ("y", labels)]),
            shape=tuple(inputs.shape[1:]),  # type: ignore[arg-type]
            mean=normalization.mean if normalization else None,
            std=normalization.std if normalization else None,
            classes=classes,
            latents=settings.latents,
            epochs=found.epochs,
            seed=seed,
            held_out=round(found.held_out, 3),
        )
        return cls(header, found.weights)

    @cached_property
    def sha256(self) -> str:
        """A hash of all of it."""
        return seal(self.header.model_dump_json(), dict(sorted(self.weights.items())))

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        write_tensors(Path(path), self.header, self.weights)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read such a file, or say in one line what is wrong with it."""
        path = Path(path)
        header, tensors = read_tensors(path, PriorHeader, FORMAT, VERSION)
        try:
            check_shape(header.shape)
            if header.normalization and header.normalization.channels != header.shape[0]:
                raise FedveilError("its normalization has another number of channels than its pictures")
            return cls(header, tensors)
        except FedveilError as error:
            raise FedveilError(f"{path} is not a valid fedveil prior: {error}") from None


def prior_at(path: str) -> Prior:
    """The generator in a file, which is read once for as long as it stays as it is."""
    try:
        state = Path(path).stat()
    except (OSError, ValueError):
        raise FedveilError(f"there is no fedveil prior at {path}") from None
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read(path: str, changed: int, size: int) -> Prior:
    return Prior.load(path)
