"""Memory that one chunk of clients frees and the next one takes again."""

from __future__ import annotations

import ctypes
import os
from functools import cache

# glibc's numbers for mallopt, and bytes: blocks up to this size come from the heap, and this much free memory at its
# end stays.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
LARGEST_BLOCK, KEPT = 32 * 2**20, 256 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Have the process keep some of the memory that it frees; whether it will (only glibc is asked).

    The C library hands large blocks back to the system as soon as they are free. Every chunk of clients then waits for
    the system to clear all pages of its gradients anew, which can take as long as computing them. The setting is one of
    the whole process: the command line and worker processes make it; in a program of yours nothing does, unless you
    call this. A process whose environment sets these limits (MALLOC_TRIM_THRESHOLD_ and its like) is left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc: macOS, Windows, musl
        return False
    return bool(set_option(MMAP_THRESHOLD, LARGEST_BLOCK) and set_option(TRIM_THRESHOLD, KEPT))
