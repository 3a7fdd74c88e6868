"""Keep the memory that one chunk of clients frees for the next."""

from __future__ import annotations

import ctypes
import os
from functools import cache

# glibc's options for mallopt, and their values in bytes: blocks up to this size come from the heap, and up to this
# much free memory at its end is kept.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
LARGEST_BLOCK, KEPT = 32 * 2**20, 256 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Make this process keep some of the memory that it frees. Returns whether it will (only with glibc).

    The C library returns large blocks to the system as soon as they are free. Every chunk of clients then waits until
    the system has cleared all pages for its gradients again, which can take as long as computing them. This setting
    affects the whole process: the command line and worker processes make it; a program of yours must call this itself.
    Nothing is changed if the environment sets such limits (MALLOC_TRIM_THRESHOLD_ and the like).
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc: macOS, Windows, musl
        return False
    return bool(set_option(MMAP_THRESHOLD, LARGEST_BLOCK) and set_option(TRIM_THRESHOLD, KEPT))
