"""What an attack looked like on its way, in files that are read one step at a time.

Thirty steps of 16 pictures of 224 px would take 290 MB of memory for each attacker of an audit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Iterates(Sequence[Tensor]):
    """The inputs (V, B, ...) at each noted step, in single precision. Victims may lie in several files."""

    files: tuple[NDArray[np.float32], ...]  # (steps, victims, B, ...)
    victims: Tensor  # (V,) places among the victims of all files, one file behind the other

    @classmethod
    def empty(cls, steps: int, shape: Sequence[int], folder: Path | None = None) -> Self:
        """Room for so many steps of inputs (V, B, ...), in a file without a name: it ends with the process."""
        with tempfile.TemporaryFile(dir=folder) as file:
            array: NDArray[np.float32] = np.memmap(file, np.float32, "w+", shape=(steps, *shape))
        return cls((array,), torch.arange(shape[0]))

    def put(self, step: int, inputs: Tensor) -> None:
        """Note the inputs of a step. For iterates made by `empty`."""
        self.files[0][step] = inputs.detach().float().cpu().numpy()

    def __len__(self) -> int:
        return len(self.files[0])

    @overload
    def __getitem__(self, step: int) -> Tensor: ...
    @overload
    def __getitem__(self, step: slice) -> list[Tensor]: ...
    def __getitem__(self, step: int | slice) -> Tensor | list[Tensor]:
        if isinstance(step, slice):
            return [self[place] for place in range(*step.indices(len(self)))]
        return torch.from_numpy(np.concatenate([array[step] for array in self.files]))[self.victims]

    def rows(self, index: slice | Tensor) -> Iterates:
        """Those of some victims, where they lie."""
        return Iterates(self.files, self.victims[index])

    def take(self, wins: Tensor, others: Sequence[Tensor]) -> None:
        """Put the victims of others in place of one's own where they win. For iterates that were made here."""
        wins, start = wins.cpu(), 0
        for array in self.files:
            mine = wins & (self.victims >= start) & (self.victims < start + array.shape[1])
            places = (self.victims[mine] - start).numpy()
            for step in range(len(self) if len(places) else 0):
                array[step][places] = others[step][mine].numpy()
            start += array.shape[1]

    @classmethod
    def concat(cls, parts: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """The victims of several runs of one attack one after another."""
        files: list[NDArray[np.float32]] = []
        victims: list[Tensor] = []
        for part in parts:
            if isinstance(part, Iterates):
                victims.append(part.victims + sum(array.shape[1] for array in files))
                files += part.files
        return cls(tuple(files), torch.cat(victims)) if files else ()

    def save(self, path: Path) -> None:
        """Write them to a file of NumPy's format, step by step; it is whole once this returns."""
        array = np.lib.format.open_memmap(path, "w+", np.float32, shape=(len(self), *self[0].shape))
        for step, inputs in enumerate(self):
            array[step] = inputs.numpy()
        array.flush()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Those of a file, read when they are asked for. A file that is no such file raises a ValueError."""
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype != np.float32 or array.ndim < 2:
            raise ValueError(f"{path.name} holds no iterates")
        return cls((array,), torch.arange(array.shape[1]))

    def __reduce__(self) -> Any:
        return _received, (np.stack([each.numpy() for each in self]),)


def _received(array: NDArray[np.float32]) -> Iterates:
    """Iterates that another process sent: back into a file."""
    own = Iterates.empty(len(array), array.shape[1:])
    own.files[0][:] = array
    return own
