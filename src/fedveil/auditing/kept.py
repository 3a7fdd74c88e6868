"""Finished attacks are kept in the audit's folder: a stopped audit does not run them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedveil.attacks.problem import Reconstruction
from fedveil.auditing.result import Role
from fedveil.files import write_atomically
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tensors import read_safetensors

Found = dict[Role, Reconstruction]
_TENSORS = ("inputs", "labels", "cost", "costs", "iterates")


def kept(path: Path | None, config: dict[str, Any], resume: bool, run: Callable[[], Found]) -> Found:
    """What an attack found: from its file if it is there, whole, and of this configuration; else run and kept."""
    if path is None:
        return run()
    mark = hashlib.sha256(json.dumps([config, torch.__version__], sort_keys=True, default=str).encode()).hexdigest()
    found = _load(path, mark) if resume else None
    if found is None:
        found = run()
        _save(path, mark, found)
    return found


def _save(path: Path, mark: str, found: Found) -> None:
    tensors = {
        f"{role}/{name}": getattr(outcome, name).contiguous() for role, outcome in found.items() for name in _TENSORS
    }
    rest = {role: {"steps": outcome.steps, "seconds": outcome.seconds} for role, outcome in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"fedveil-attack": mark, "rest": json.dumps(rest), "sha256": _seal(tensors, rest)}
    write_atomically(path, safetensors.torch.save(tensors, metadata))


def _seal(tensors: dict[str, Tensor], rest: object) -> str:
    """The hash of all that is kept: the format itself would not notice a flipped bit."""
    text = json.dumps(rest, sort_keys=True)
    return hashlib.sha256(f"{fingerprint(sorted(tensors.items()))} {text}".encode()).hexdigest()


def _load(path: Path, mark: str) -> Found | None:
    """What was kept; None where the file is missing, damaged or of another configuration."""
    try:
        metadata, tensors = read_safetensors(path)
        if metadata.get("fedveil-attack") != mark:
            return None
        rest = json.loads(metadata["rest"])
        if metadata["sha256"] != _seal(tensors, rest):
            return None
        return {
            cast(Role, role): Reconstruction(
                **{name: tensors[f"{role}/{name}"] for name in _TENSORS},
                steps=list(said["steps"]),
                seconds=float(said["seconds"]),
            )
            for role, said in rest.items()
        }
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None
