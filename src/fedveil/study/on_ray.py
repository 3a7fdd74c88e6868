"""The audits of a grid on a Ray cluster. Its machines need a store that all of them reach, under the same path."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from fedveil.errors import FedveilError, one_line
from fedveil.study.rooms import IndexedStore
from fedveil.study.running import Done, Grid, Job, make_job


def run_on_ray(grid: Grid, store: IndexedStore, where: str, done: Done | None = None) -> None:
    """Make every result of a grid on Ray: "ray" starts a local one, "ray://HOST:PORT" goes to a cluster."""
    if where != "ray" and not where.startswith("ray://"):
        raise FedveilError(f"--on must be ray or ray://HOST:PORT (got '{where}')")
    if store.folder is None:
        raise FedveilError("Ray's workers share what they compute through a store: name a folder with --store")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise FedveilError("--on ray needs Ray: pip install 'fedveil[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report its use over the network
    ours = not ray.is_initialized()
    try:
        if ours:
            ray.init(address=None if where == "ray" else where, include_dashboard=False, log_to_driver=False)
        _shared_out(ray, grid, store.folder.absolute(), done)
    except ray.exceptions.RayTaskError as error:  # what went wrong in an audit, not with Ray
        cause = error.cause
        raise cause if isinstance(cause, FedveilError) else FedveilError(one_line(cause)) from None
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        raise FedveilError(
            f"Ray: {one_line(error)}. What was computed is kept: start again, or leave out --on"
        ) from None
    finally:
        if ours:
            ray.shutdown()


def _shared_out(ray: Any, grid: Grid, folder: Path, done: Done | None) -> None:
    make = ray.remote(num_cpus=1)(make_job)
    waiting = {make.remote(Job(Grid(grid.study, [cell], grid.command), folder)): cell for cell in grid.cells}
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1)
        cell = waiting.pop(ready[0])
        seconds = ray.get(ready[0])
        if done is not None:
            done(cell, seconds)
