"""Tensors from files and from other processes, in memory like that of every other tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from torch import Tensor


def own_memory(tensor: Tensor) -> Tensor:
    """A copy where torch itself puts tensors: at a multiple of 64 bytes.

    A file or a message leaves tensors at any address, and kernels that start elsewhere in a vector add up in another
    order. Without the copy a resumed run would differ from one that was never stopped in its last bits, and an attack
    on it in far more.
    """
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def read_safetensors(
    path: Path, accept: Callable[[dict[str, str]], None] | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a file; raises what `safetensors` raises.

    accept: is shown the metadata first, and may raise an error before gigabytes of another file are read.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        if accept:
            accept(metadata)
        names: list[str] = file.keys()
        return metadata, {name: own_memory(file.get_tensor(name)) for name in names}
