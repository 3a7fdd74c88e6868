"""Content keys: a hash of all that a stage's result depends on, by what things are and not by what they are called.

A key holds the settings that the stage reads, content hashes of what it is given, the revision of the stage and of
every declared class that runs in it, torch's version, and how it computes. A user's own forward pass and loss enter by
a hash of what they compute on a fixed batch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.scene import Public, Scene
from fedveil.clients.behavior import behavior
from fedveil.clients.compiling import compiler_found
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.fields import field_values
from fedveil.streams import Streams
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tasks.inputs import leaves
from fedveil.tree import Tree

# Raised when a stage comes to other results for the same inputs.
REVISIONS = {"train": 3, "observe": 1, "fit": 1, "attack": 1, "score": 1, "result": 1}


def content_key(stage: str, **parts: Any) -> str:
    """The key of a stage's result: a SHA-256 in hexadecimal."""
    said = {"stage": [stage, REVISIONS[stage]], "torch": torch.__version__, **parts}
    return hashlib.sha256(json.dumps(said, default=str, sort_keys=True).encode()).hexdigest()


# ---- classes ----------------------------------------------------------------------------------------------


def described(thing: Defense | Attack) -> list[Any]:
    """A declared thing: its class, what that class does by now, and all its fields."""
    kind: type[Any] = type(thing)
    read = [thing.content] if isinstance(thing, Attack) and thing.content else []
    return [f"{kind.__module__}.{kind.__qualname__}", implementation(kind), field_values(thing), *read]  # type: ignore[arg-type]


def described_chain(chain: Chain) -> list[Any]:
    """The defenses of a chain in their order."""
    return [described(each) for each in chain.defenses]


@cache
def implementation(kind: type[Any]) -> str:
    """Which form of a class's code runs: fedveil's own by revision, a package's by version, other code by its text."""
    package = kind.__module__.partition(".")[0]
    if package == "fedveil":
        return f"revision {getattr(kind, 'revision', 1)}"
    for name in packages_distributions().get(package, ()):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    try:
        text = inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):  # typed into a console: told from others by its fields alone
        return "unknown"
    return hashlib.sha256(text.encode()).hexdigest()


# ---- tensors ----------------------------------------------------------------------------------------------


def of_trees(trees: Mapping[str, Tree]) -> str:
    """A hash of named trees; of a number that is repeated over an axis, once."""
    return fingerprint(
        (f"{place}/{name}/{tuple(tensor.shape)}", _once(tensor))
        for place, tree in trees.items()
        for name, tensor in tree.items()
    )


def of_tensors(tensors: Mapping[str, Tensor | None]) -> str:
    """A hash of named tensors."""
    return fingerprint((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _once(tensor: Tensor) -> Tensor:
    once = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
    return once.clone(memory_format=torch.contiguous_format)


def of_updates(updates: Updates) -> dict[str, Any]:
    """What some clients sent, and the public facts of it."""
    trees = {"before": updates.before, "message": updates.message, "buffers": updates.buffers}
    rest = (updates.kind, updates.lr, updates.batch_sizes, updates.momentum, updates.weight_decay, updates.local_epochs)
    return {"tensors": of_trees(trees), "facts": repr(rest)}


def of_streams(streams: Streams) -> str:
    """What streams will draw. Drawn from a child, which moves no stream on."""
    return fingerprint([("draws", streams.fold("content key").normal(4))])


# ---- what attackers have ----------------------------------------------------------------------------------


def of_public(public: Public, row: Mapping[str, Tensor], batch_size: int) -> dict[str, Any]:
    """The model and the loss by what they compute, at the weights and buffers of `row`, on a fixed batch."""
    like = next(tensor for tensor in row.values() if tensor.is_floating_point())
    draw = Streams.seeded(0, [0], "content key")
    uniform = draw.uniform(batch_size, *public.layout.shape)[0].to(like)
    inputs = public.layout.inputs(public.layout.drawn(uniform))
    labels = public.target.zeros(batch_size, device=like.device)
    return {
        "behavior": behavior(public.model, public.loss, row, inputs, labels),
        "mode": [name for name, module in public.model.named_modules() if module.training],
        **of_layout(public),
    }


def of_layout(public: Public) -> dict[str, Any]:
    """What is known of inputs and labels, whatever the model is."""
    box = dict(zip(("low", "high"), public.layout.box or (), strict=False))
    said = [public.layout.modality, public.layout.shape, of_tensors(box)]
    columns = [] if public.layout.columns is None else [public.layout.columns.described()]
    text = [] if public.layout.text is None else [public.layout.text.described()]
    return {"layout": [*said, *columns, *text], "classes": public.classes}


def of_scene(scene: Scene) -> dict[str, Any]:
    """All that an attacker has. The order of the entries, too, decides how an attack runs."""
    row = {**scene.updates.before.row(0), **scene.updates.buffers.row(0)}
    given: dict[str, Tensor | None] = {"labels": scene.labels}
    if scene.lengths is not None:
        given["lengths"] = scene.lengths
    if scene.candidates is not None:
        given["candidate labels"] = scene.candidates.labels
        given |= {f"candidates {name}": tensor for name, tensor in leaves(scene.candidates.inputs).items()}
    if scene.suspects is not None:
        given["suspects' labels"] = scene.suspects.labels
        given |= {f"suspects {name}": tensor for name, tensor in leaves(scene.suspects.inputs).items()}
    return {
        "public": of_public(scene.public, row, scene.batch_size),
        "updates": of_updates(scene.updates),
        "streams": of_streams(scene.streams),
        "given": of_tensors(given),
        "chain": described_chain(scene.chain),
        "local": repr(scene.local),
        "backend": [scene.bench.backend, compiler_found()],  # what "auto" comes to is predicted from what is in here
        "chunk": scene.bench.chunk,
        **({"views": [of_trees({"message": view.message}) for view in scene.views]} if scene.views else {}),
    }


def training_key(trained: Mapping[str, Any], chain: Chain, computed: Sequence[Any]) -> str:
    """Of a run: `trained` says what was trained and how, `computed` by which machinery."""
    return content_key("train", run=dict(trained), chain=described_chain(chain), computed=list(computed))


def attack_key(attack: Attack, scene: Scene, fitted: str) -> str:
    """Of an attack on a scene, after it learned what has the key `fitted`."""
    return content_key("attack", attack=described(attack), scene=of_scene(scene), fitted=fitted)
