"""The process that worker processes are forked from: it has imported what they need before they are needed.

Every worker used to import torch by itself, which takes a second of a core each. This module imports nothing heavy,
so that a command can start the server first and import the same things beside it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.resource_tracker
import os
import signal
from multiprocessing import forkserver

from fedveil.signals import deaf_children

PRELOADED = ["fedveil.federation.chunk_workers", "fedveil.attacks.running"]


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def context() -> multiprocessing.context.BaseContext:
    """How worker processes start. The server starts with the first of them, if it does not run yet."""
    if not _has_server():
        return multiprocessing.get_context("spawn")
    start()
    return multiprocessing.get_context("forkserver")


def start() -> None:
    """Start the server now, for workers that are likely to be needed soon. It ends with this process."""
    if not _has_server():
        return
    forkserver.set_forkserver_preload(PRELOADED)
    with deaf_children():
        multiprocessing.resource_tracker.ensure_running()  # lets signals in again
    with deaf_children():
        forkserver.ensure_running()


def stop() -> None:
    """End the server at once, also while it is still importing: nothing outlives a command that failed early."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def _has_server() -> bool:
    return "forkserver" in multiprocessing.get_all_start_methods()
