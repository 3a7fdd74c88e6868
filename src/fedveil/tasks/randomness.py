"""Seeded randomness for splits, partitions and initial weights."""

from __future__ import annotations

import hashlib
import json

import numpy as np


def derived_key(seed: int, *path: str | int) -> int:
    """A 128-bit number for one purpose of a run: the hash of the seed and the purpose."""
    text = json.dumps([seed, *path]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A random generator for one purpose: other purposes with the same seed draw independently.

    Philox is counter-based and takes the whole 128-bit key.

    >>> bool(generator(0, "partition").integers(1000) == generator(0, "partition").integers(1000))
    True
    """
    return np.random.Generator(np.random.Philox(key=derived_key(seed, *path)))
