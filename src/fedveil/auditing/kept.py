"""Finished attacks are kept in the audit's folder: a stopped audit does not run them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.problem import Problem, Reconstruction
from fedveil.auditing.roles import Role
from fedveil.clients.behavior import behavior
from fedveil.clients.compiling import compiler_found
from fedveil.clients.engine import Backend
from fedveil.files import write_atomically
from fedveil.registry import attacks as registry
from fedveil.streams import Streams
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tensors import read_safetensors
from fedveil.tree import Tree
from fedveil.version import __version__

Found = dict[Role, Reconstruction]
_TENSORS = ("inputs", "labels", "cost", "costs", "iterates")


# ---- what an attack's outcome depends on ----------------------------------------------------------------------


def content_key(attack: Attack, problems: Mapping[Role, Problem], backend: Backend) -> str:
    """A SHA-256 of all that the outcome of an attack on these problems depends on, by content and not by name.

    Which backend "auto" comes to follows from what is in here: it is predicted, not timed.
    """
    kind = type(attack)
    said = {
        "versions": [__version__, torch.__version__],
        "attack": [f"{kind.__module__}.{kind.__qualname__}", registry.describe(attack), repr(attack.choices())],
        "backend": [backend, compiler_found()],
        "problems": {role: _described(problem) for role, problem in problems.items()},
    }
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()


def _described(problem: Problem) -> dict[str, Any]:
    """What one attacker is given. The order of the entries, too, decides how an attack runs."""
    like = problem.like
    draw = Streams.seeded(0, [0], "content key")
    inputs = draw.uniform(problem.batch_size, *problem.shape)[0].to(like)
    noise = draw.normal(*inputs.shape)[0].to(like)
    trees = {name: getattr(problem, name) for name in ("params", "buffers", "target", "weight")}
    given = {"labels": problem.labels, **dict(zip(("low", "high"), problem.box or (), strict=False))}
    labels = torch.zeros(len(inputs), dtype=torch.int64, device=like.device)
    if problem.labels is not None:
        labels = problem.labels[0]
    row = {**problem.params.row(0), **problem.buffers.row(0)}
    return {
        "tensors": fingerprint([*_listed(trees), *((n, t) for n, t in given.items() if t is not None)]),
        "victims": problem.count,
        # Drawn from a child, which moves no stream on.
        "streams": fingerprint([("draws", problem.streams.fold("content key").normal(4))]),
        "behavior": behavior(problem.model, problem.loss, row, inputs, labels),
        "mode": [name for name, module in problem.model.named_modules() if module.training],
        "simulate": fingerprint((str(i), replay(inputs, noise)) for i, replay in enumerate(problem.simulate)),
        "settings": repr(
            [problem.shape, problem.batch_size, problem.classes, problem.local, problem.before, problem.labels is None]
        ),
    }


def _listed(trees: Mapping[str, Tree]) -> Iterable[tuple[str, Tensor]]:
    """Every tensor by name; of a number that is repeated over an axis, once."""
    for place, tree in trees.items():
        for name, tensor in tree.items():
            once = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
            yield f"{place}/{name}/{tuple(tensor.shape)}", once.clone(memory_format=torch.contiguous_format)


# ---- their files ------------------------------------------------------------------------------------------------


def kept(path: Path | None, key: Callable[[], str], resume: bool, run: Callable[[], Found]) -> Found:
    """What an attack found: from its file if it is there, whole, and of this content; else run and kept."""
    if path is None:
        return run()
    mark = key()
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
