"""SHA-256 of tensors by name, type, shape and bytes: says whether two runs used the same data and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


class Fingerprint:
    """A running SHA-256 over named tensors, in the order in which they are added."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor. Its header goes first, so that no two lists of tensors read as the same bytes."""
        self._hash.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        # `reshape(-1)` because a tensor without axes cannot be viewed as bytes.
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._hash.update(flat.view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """The hash so far, in hexadecimal."""
        return self._hash.hexdigest()


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The SHA-256 of named tensors in their order."""
    total = Fingerprint()
    for name, tensor in tensors:
        total.add(name, tensor)
    return total.hexdigest()
