"""Tensors from files and from other processes, in memory that is aligned like that of every other tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.files import write_atomically


def own_memory(tensor: Tensor) -> Tensor:
    """A copy where torch itself puts tensors: at a multiple of 64 bytes.

    Tensors from a file or a message can start at any address, and vectorized kernels add up in another order
    there. Without the copy, the last bits of a resumed run would differ from those of a run that was never stopped,
    and an attack on it would differ far more.
    """
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def read_safetensors(
    path: Path, accept: Callable[[dict[str, str]], None] | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file; raises what `safetensors` raises.

    accept: is shown the metadata first, and may raise an error before gigabytes of a wrong file are read.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        if accept:
            accept(metadata)
        names: list[str] = file.keys()
        return metadata, {name: own_memory(file.get_tensor(name)) for name in names}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor | NDArray[Any]], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors or arrays of any device and layout into a file, completely or not at all."""
    # Copies, because the format refuses tensors that share memory, as rows of one stacked tensor do.
    copies = {
        name: own_memory(value.cpu()) if isinstance(value, Tensor) else torch.tensor(value)
        for name, value in tensors.items()
    }
    write_atomically(path, safetensors.torch.save(copies, metadata))
