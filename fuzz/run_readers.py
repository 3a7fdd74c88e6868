"""The readers of fedveil's own files, which may come from anybody: captures, checkpoints, weights, settings."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import safetensors.torch
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

from fedveil.attacks.finding import Finding, Links, Reconstruction
from fedveil.attacks.generator import GeneratorSettings, decoded
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.iterates import Iterates
from fedveil.attacks.prior_file import Prior
from fedveil.auditing.attacking import _FindingForm
from fedveil.auditing.capture_checks import CaptureSetting, check_captures, examples_of
from fedveil.auditing.captures import attack
from fedveil.auditing.store import ENTRY, Store, Wanted
from fedveil.defenses.base import Call, Defense
from fedveil.defenses.chain import Chain
from fedveil.federation.capture import Capture, Truth
from fedveil.federation.observers import Observer
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.fields import declared
from fedveil.leakage import lpips, reference
from fedveil.tasks.examples import ArrayExamples
from fedveil.tasks.task import Task
from fedveil.tensorfile import KEY, ORDER, seal
from fedveil.tree import Tree
from fuzz.mutate import any_of, damaged, json_text
from fuzz.reader import Files, Reader, Refused
from fuzz.structures import odd_metadata, pickle_files, safetensors_bytes, safetensors_files, safetensors_parts, zips


def written(write: Callable[[Path], object], name: str) -> bytes:
    """What a function writes into a file of this name."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return (Path(folder) / name).read_bytes()


def saved(thing: Capture | Truth) -> bytes:
    """The file of a capture or a truth."""
    return written(lambda folder: thing.save(folder / "x"), "x")


def named(name: str, contents: SearchStrategy[bytes]) -> SearchStrategy[Files]:
    """Folders with one file."""
    return contents.map(lambda content: {name: content})


def sealed(content: bytes) -> bytes:
    """Set the right hash if the file can be read at all: otherwise hardly any reader would get past the hash."""
    try:
        header, data = safetensors_parts(content)
        metadata = header["__metadata__"]
        tensors = safetensors.torch.load(content)
        order = json.loads(metadata.get(ORDER, "null"))
        inner = json.loads(metadata[KEY])
        inner["sha256"] = seal(metadata[KEY], tensors if order is None else {name: tensors[name] for name in order})
        metadata[KEY] = json_text(inner)
        return safetensors_bytes(header, data)
    except Exception:  # whatever the mutation broke
        return content


def forged(content: bytes) -> SearchStrategy[bytes]:
    """Files like this one, two in three with the right hash."""
    return st.one_of(
        safetensors_files(content), *(each.map(sealed) for each in (odd_metadata(content), safetensors_files(content)))
    )


# ---- captures and truths -------------------------------------------------------------------------------------

FACTS = {
    "model": "mlp:hidden=[3]",
    "loss": "cross_entropy",
    "shape": [1, 4, 4],
    "classes": 3,
    "mean": [0.5],
    "std": [0.2],
}
MORE_FACTS = {"defense": "gradient-dropout:keep=0.8", "local_epochs": 2, "weight_decay": 0.1, "buffers": "shared"}
FEW = 64  # most examples of a capture that is attacked here


def _captured() -> tuple[Capture, ...]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.ReLU(), nn.Linear(3, 3))
    row = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    other = {name: tensor + 0.01 for name, tensor in row.items()}
    known: dict[str, Any] = {"before": row, "shared": other, "client": 0, "round": 1}
    return (
        Capture(kind="gradient", lr=(0.1,), batch_sizes=(8,), facts=FACTS | MORE_FACTS | {"local_epochs": 1}, **known),
        Capture(kind="weights", lr=(0.1,) * 4, batch_sizes=(3,) * 4, steps=4, facts=FACTS | MORE_FACTS, **known),
        Capture(
            kind="delta",
            lr=(0.1,),
            batch_sizes=(2,),
            momentum=0.9,
            facts={**FACTS, "model": {"name": "mlp", "hidden": [3]}, "defense": None},
            **known,
        ),
    )


def _captures() -> SearchStrategy[Files]:
    return named("capture.safetensors", st.sampled_from([saved(each) for each in _captured()]).flatmap(forged))


def _attackable() -> SearchStrategy[Files]:
    with tempfile.TemporaryDirectory() as folder:
        for capture in _captured():  # what an attack loads in its first run must not count against a file
            _attack(capture, Path(folder))
    return _captures()


def _read_capture(folder: Path) -> object:
    """Read as `fedveil attack` does before it starts."""
    capture = Capture.load(folder / "capture.safetensors")
    check_captures([capture], CaptureSetting())
    assert examples_of(capture) >= 1
    return capture


def _attack_capture(folder: Path) -> object:
    """Whatever is accepted as a capture must be attackable."""
    return _attack(Capture.load(folder / "capture.safetensors"), folder)


def _attack(capture: Capture, folder: Path) -> object:
    check_captures([capture], CaptureSetting())
    if sum(capture.batch_sizes) > FEW or math.prod(capture.public.shape or ()) > FEW:
        raise Refused  # it would take its time and memory, as it may
    quick = InvertingGradients(steps=1, restarts=1, labels="recovered")
    found = attack(capture, quick, backend="loop", store=folder / "store", progress=False)
    assert found.result.verdict.status == "not judged"
    return found


def _truths() -> SearchStrategy[Files]:
    images, labels = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2])
    several = {"image": images, "age": torch.rand(3, 1)}
    choices = (Truth(images, labels, images), Truth(several, labels, several))
    contents = [saved(each) for each in choices]
    return named("truth.safetensors", st.sampled_from(contents).flatmap(forged))


# ---- checkpoints ---------------------------------------------------------------------------------------------


@declared
class Remembering(Defense):
    """A defense with a memory that lasts over rounds: it adds half of what it held back before."""

    name: ClassVar[str] = "remembering"
    state_scope: ClassVar[Literal["round", "run"]] = "run"

    def protect(self, update: Tree, call: Call) -> Tree:
        """Half of the update and of the rest so far."""
        rest = {name: call.state.get(name, torch.zeros_like(tensor)) for name, tensor in update.items()}
        for name, tensor in update.items():
            call.state[name] = 0.5 * (tensor + rest[name])
        return Tree({name: 0.5 * (tensor + rest[name]) for name, tensor in update.items()})


class _Stop(Observer):
    def on_round_start(self, number: int, clients: list[int]) -> None:
        if number > 1:
            raise Refused


CHAIN = Chain((Remembering(),))
SETTINGS = FederationSettings(rounds=2, batch_size=4, momentum=0.5, patience=3, sampling_rate=0.7)


@functools.cache
def _task() -> Task:
    """A tiny task whose model has buffers."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    parts = [(torch.rand(size, 4), torch.arange(size) % 2) for size in (12, 6, 6)]
    places = [torch.arange(start, start + 4) for start in (0, 4, 8)]
    return Task(model, tuple(parts), clients=places, buffers="local")


def _checkpoints() -> SearchStrategy[Files]:
    def write(folder: Path) -> None:
        with contextlib.suppress(Refused):
            federate(_task(), CHAIN, SETTINGS, backend="loop", folder=folder, observers=[_Stop()])

    content = written(write, "checkpoint.safetensors")
    return named("checkpoint.safetensors", forged(content))


def _read_checkpoint(folder: Path) -> object:
    """Resume the run: whatever is accepted as a checkpoint must do for its last round."""
    return federate(_task(), CHAIN, SETTINGS, backend="loop", folder=folder, resume=True)


# ---- findings that a store kept ------------------------------------------------------------------------------

KEYS = {"rebuilt": "a" * 64, "linked": "b" * 64}


def _findings() -> dict[str, Finding]:
    iterates = Iterates.empty(2, (2, 1, 1, 4, 4))
    for step in range(2):
        iterates.put(step, torch.rand(2, 1, 1, 4, 4))
    rebuilt = Reconstruction(
        inputs=torch.rand(2, 1, 1, 4, 4),
        labels=torch.tensor([[0], [1]]),
        cost=torch.rand(2),
        seconds=0.5,
        steps=[0, 5],
        costs=torch.rand(2, 2),
        iterates=iterates,
    )
    return {"rebuilt": rebuilt, "linked": Links(torch.rand(2, 5), torch.ones(2, dtype=torch.bool), 0.5)}


def _kept(folder: Path, make: Callable[[list[str], Path | None], dict[str, Finding]]) -> dict[str, Finding]:
    wanted = {name: Wanted(key, name) for name, key in KEYS.items()}
    return Store(folder).keep_all("attack", wanted, _FindingForm(), lambda *given: make(*given).items())


def _entries() -> SearchStrategy[Files]:
    with tempfile.TemporaryDirectory() as place:
        _kept(Path(place), lambda missing, unfinished: _findings())
        found = {
            str(path.relative_to(place)): path.read_bytes()
            for path in Path(place).rglob("*")
            if path.is_file() and not path.name.endswith(".lock")
        }

    def changed(name: str) -> SearchStrategy[Files]:
        content = found[name]
        forgeries = forged(content) if name.endswith(ENTRY) else damaged(content)
        return forgeries.map(lambda made: {**found, name: made})

    return st.sampled_from(sorted(found)).flatmap(changed)


def _read_entries(folder: Path) -> object:
    """What a store takes for a finding has the form of one. A damaged one is made again."""

    def make(missing: list[str], unfinished: Path | None) -> dict[str, Finding]:
        raise Refused

    found = _kept(folder, make)
    for each in found.values():
        if isinstance(each, Reconstruction):
            assert each.labels.shape == each.inputs.shape[:2]
            assert each.costs is None or each.costs.shape == (len(each.cost), len(each.steps))
            assert all(step.shape == each.inputs.shape for step in each.iterates)
        elif isinstance(each, Links):
            assert each.scores.shape[:1] == each.exact.shape
        else:
            assert each.scores.dim() == 2
    return found


# ---- generators ----------------------------------------------------------------------------------------------


def _priors() -> SearchStrategy[Files]:
    pictures = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    examples = ArrayExamples(pictures, torch.arange(12) % 3)
    made = Prior.train(examples, "noise", settings=GeneratorSettings(latents=2, epochs=1))
    _drawn(made)  # what a first drawing loads must not count against a file
    content = written(lambda folder: made.save(folder / "prior.safetensors"), "prior.safetensors")
    return named("prior.safetensors", forged(content))


def _read_prior(folder: Path) -> object:
    """Whatever is accepted as a generator must draw."""
    return _drawn(Prior.load(folder / "prior.safetensors"))


def _drawn(prior: Prior) -> Tensor:
    drawn = decoded(prior.weights, prior.weights["mean"][None], prior.header.shape)
    assert drawn.shape == (1, *prior.header.shape)
    return drawn


# ---- weights -------------------------------------------------------------------------------------------------


def _thin(net: str) -> nn.Sequential:
    """AlexNet's layers with two channels each: weights of a few kilobytes."""
    layers: list[nn.Module] = []
    for before, size in ((3, 3), (2, 3), (2, 3), (2, 3), (2, 3)):
        layers += [nn.Conv2d(before, 2, size, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(3, stride=2)] if len(layers) in (2, 5) else []
    return nn.Sequential(*layers)


def _head_tensors() -> dict[str, Tensor]:
    return {f"lin{depth}.model.1.weight": torch.rand(1, 2, 1, 1) for depth in range(5)}


def _feature_bytes() -> bytes:
    state = {f"features.{name}": tensor for name, tensor in _thin("alex").state_dict().items()}
    return safetensors.torch.save(state)


def _weights() -> SearchStrategy[Files]:
    features, heads = _feature_bytes(), safetensors.torch.save(_head_tensors())
    names = "weights/alexnet_imagenet_features.safetensors", "weights/lpips_heads_alex.safetensors"
    return st.one_of(
        safetensors_files(features).map(lambda content: {names[0]: content, names[1]: heads}),
        safetensors_files(heads).map(lambda content: {names[0]: features, names[1]: content}),
    )


def _read_weights(folder: Path) -> object:
    with patch.object(lpips, "convolutions", _thin):
        distance = lpips.load("alex", folder)
    assert all(
        bool(torch.isfinite(tensor).all()) for tensor in (*distance.heads, *distance.model.state_dict().values())
    )
    return distance


def _packaged() -> SearchStrategy[Files]:
    """The heads as an installed package has them: a file of torch.save, which is a zip with a pickle in it."""
    file = io.BytesIO()
    torch.save(_head_tensors(), file)
    content = file.getvalue()
    pickles = pickle_files({"lin0.model.1.weight": [0.5]})
    inside = zips({"x/data.pkl": pickles, "x/version": st.just(b"3\n"), "x/data/0": st.just(b"\0" * 8)})
    features = _feature_bytes()
    return any_of(damaged(content), inside, pickles).map(
        lambda made: {"weights/alexnet_imagenet_features.safetensors": features, "package/alex.pth": made}
    )


def _read_packaged(folder: Path) -> object:
    package = SimpleNamespace(submodule_search_locations=[str(folder / "package")])
    with (
        patch.object(lpips, "convolutions", _thin),
        patch.object(lpips, "PACKAGES", {"package": "."}),
        patch("importlib.util.find_spec", lambda name: package),
    ):
        return lpips.load("alex", folder)


def _references() -> SearchStrategy[Files]:
    content = safetensors.torch.save(reference.SmallNet((1, 4, 4), 2).state_dict())
    return named("reference.safetensors", safetensors_files(content))


def _read_reference(folder: Path) -> object:
    model = reference.SmallNet((1, 4, 4), 2)
    if not reference._load(model, folder / "reference.safetensors"):  # `reference` itself would train one first
        raise Refused
    return model


RUN_READERS = (
    Reader("capture", _captures, _read_capture, 2500),
    Reader("attacked capture", _attackable, _attack_capture, 800),
    Reader("truth", _truths, lambda folder: Truth.load(folder / "truth.safetensors"), 800),
    Reader("checkpoint", _checkpoints, _read_checkpoint, 1500),
    Reader("kept finding", _entries, _read_entries, 1000),
    Reader("prior", _priors, _read_prior, 1000),
    Reader("lpips weights", _weights, _read_weights, 800),
    Reader("lpips package", _packaged, _read_packaged, 800),
    Reader("reference cache", _references, _read_reference, 500),
)
