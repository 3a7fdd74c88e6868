"""Breaching as a process that stays warm and takes tasks: our end of `breaching_side.py`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.environment import HERE, python_of


class Breaching:
    """A running side. Make it with `breaching_side`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._save = folder / "reconstructions.npy"
        self.threads: int = self._answer()["threads"]

    def attack(self, victims: Sequence[int], steps: int, total_variation: float) -> Tensor:
        """Its reconstructions of some victims, one after another."""
        task = {
            "victims": list(victims),
            "iterations": steps,
            "total_variation": total_variation,
            "save": str(self._save),
        }
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        self._answer()
        return torch.from_numpy(np.load(self._save))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"breaching ended with exit code {self._process.wait()}: see its messages above")
        return dict(json.loads(line))


@contextlib.contextmanager
def breaching_side(path: Path, *, threads: int | None) -> Iterator[Breaching]:
    """Breaching on a file of victims, with so many threads; None: as many as it takes by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [str(python_of("breaching")), "-P", "-W", "ignore", str(HERE / "breaching_side.py"), str(path)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        yield Breaching(process, Path(folder))
        assert process.stdin is not None
        process.stdin.close()
