"""The process that worker processes are forked from: it has imported what they need before they are needed.

A spawned worker imports torch by itself, which takes a core more than a second. This module imports nothing heavy, so
that a command can start the server first and import the same things beside it. Forked from it, workers have
started and loaded kept code 0.2 s after they are asked for. The server holds no data, runs one thread, and ends with
the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

from fedveil.signals import deaf_children

PRELOADED = ["fedveil.federation.chunk_workers", "fedveil.attacks.running"]
# Bytes of the path of the temporary folder at most: that of a socket in it has 107.
LONGEST = 107 - len("/pymp-12345678/listener-12345678")


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def context() -> multiprocessing.context.BaseContext:
    """How worker processes start. The server starts with the first of them, if it does not run yet."""
    if not _has_server():
        return multiprocessing.get_context("spawn")
    start()
    return multiprocessing.get_context("forkserver")


def start(*also: str) -> None:
    """Start the server now, for workers that are likely to be needed soon; they find these modules imported, too."""
    if not _has_server():
        return
    forkserver.set_forkserver_preload([*PRELOADED, *also])  # where the server runs already, this changes nothing
    with deaf_children():
        multiprocessing.resource_tracker.ensure_running()  # lets signals in again
    with deaf_children(), _one_thread():
        forkserver.ensure_running()


def stop() -> None:
    """End the server at once, also while it is still importing: a command that fails early leaves nothing behind."""
    if not _has_server():
        return
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()  # waits for it, so that another one can start


def _has_server() -> bool:
    """Whether this system has fork servers, and a place for one's socket.

    On macOS, libraries that torch loads do not survive a fork.
    """
    if sys.platform == "darwin" or "forkserver" not in multiprocessing.get_all_start_methods():
        return False
    return len(os.fsencode(tempfile.gettempdir())) <= LONGEST


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """NumPy starts threads when it is imported, and a process of several threads should not fork."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
