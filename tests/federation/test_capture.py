"""Captures: what is in them, what is not, and files that lie."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, Captured, Truth, pseudo_gradient, step_weight
from fedveil.federation.run import federate
from fedveil.federation.settings import Federation
from fedveil.tasks.inputs import leaves

from .small import Shift, assert_rows_close, assert_rows_equal, small_task

FEDAVG = Federation(protocol="fedavg", rounds=1, batch_size=5, record_rounds=(1,))


def a_capture(**changed: object) -> Capture:
    fields: dict[str, object] = {
        "kind": "gradient",
        "before": {"w": torch.ones(2, 3), "b": torch.zeros(2)},
        "shared": {"w": torch.randn(2, 3), "b": torch.randn(2)},
        "buffers": {"mean": torch.ones(2), "steps": torch.tensor(3)},
        "buffers_before": {"mean": torch.zeros(2), "steps": torch.tensor(2)},
        "client": 3,
        "round": 1,
        "lr": (0.1,),
        "batch_sizes": (8,),
        "facts": {"loss": "cross_entropy", "mean": [0.5], "classes": 10, "defense": "none"},
    }
    return Capture(**{**fields, **changed})  # type: ignore[arg-type]


def rewritten(path: Path, *, header: dict[str, object] | None = None, **tensors: torch.Tensor | None) -> Path:
    """The file with some header fields or tensors replaced (None: removed)."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    found = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedveil"])
    held = safetensors.torch.load(content)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    for name, value in (header or {}).items():
        found.pop(name, None)
        if value is not None:
            found[name] = value
    safetensors.torch.save_file(held, path, metadata={"fedveil": json.dumps(found)})
    return path


def test_round_trip(tmp_path: Path) -> None:
    capture = a_capture()
    capture.save(tmp_path / "one")
    loaded = Capture.load(tmp_path / "one")
    for name in ("before", "shared", "buffers", "buffers_before"):
        assert_rows_equal(getattr(loaded, name), getattr(capture, name))
    for name in ("kind", "client", "round", "steps", "lr", "momentum", "batch_sizes", "facts"):
        assert getattr(loaded, name) == getattr(capture, name)
    a_capture(buffers=None, buffers_before=None).save(tmp_path / "two")
    assert Capture.load(tmp_path / "two").buffers is None


def test_the_order_of_the_tensors_is_kept(tmp_path: Path) -> None:
    row = {name: torch.ones(size) for size, name in enumerate(("z", "a", "m", "b"), 1)}
    a_capture(before=row, shared=row).save(tmp_path / "one")
    assert list(Capture.load(tmp_path / "one").shared) == ["z", "a", "m", "b"]
    rewritten(tmp_path / "one")  # as another program would write it, which knows nothing of the order
    assert sorted(Capture.load(tmp_path / "one").shared) == ["a", "b", "m", "z"]


def test_names_may_hold_slashes(tmp_path: Path) -> None:
    row = {"a/b": torch.ones(1)}
    a_capture(before=row, shared=row).save(tmp_path / "one")
    assert_rows_equal(Capture.load(tmp_path / "one").shared, row)


@pytest.mark.parametrize(
    "header, tensors, said",
    [
        ({}, {"shared/w": None}, "w is in 'before' but not in 'shared'"),
        ({}, {"before/w": None, "before/b": None}, "no 'before' tensors"),
        ({}, {"shared/w": torch.ones(3, 2)}, "shape"),
        ({}, {"shared/b": torch.ones(2, dtype=torch.float64)}, "float64"),
        ({}, {"shared/b": torch.ones(2, dtype=torch.int64), "before/b": torch.ones(2, dtype=torch.int64)}, "floating"),
        ({}, {"shared/b": torch.tensor([1.0, float("nan")])}, "shared/b contains NaN"),
        ({}, {"before/b": torch.tensor([1.0, float("inf")])}, "before/b contains NaN"),
        ({}, {"buffers/mean": torch.tensor([1.0, float("nan")])}, "buffers/mean contains NaN"),
        ({}, {"buffers/mean": torch.ones(5)}, "buffers/mean has shape"),
        ({}, {"seen/x": torch.ones(5)}, "'seen', which no capture has"),
        ({"kind": "model"}, {}, "kind"),
        ({"kind": None}, {}, "kind is required"),
        ({"labels": [1, 2]}, {}, "no field 'labels'"),
        ({"lr": [0.1, 0.1]}, {}, "lr needs one value per step: 1, not 2"),
        ({"lr": [-1.0]}, {}, "lr must be positive"),
        ({"lr": "0.1"}, {}, "lr"),
        ({"steps": 2, "lr": [0.1, 0.1], "batch_sizes": [1, 1]}, {}, "1 step"),
        ({"batch_sizes": [0]}, {}, "batch_sizes must be positive"),
        ({"momentum": 1.5}, {}, "momentum"),
        ({"round": 0}, {}, "round 0"),
        ({"client": 1.5}, {}, "client"),
        ({"format": "fedveil-truth"}, {}, "not a fedveil capture"),
        ({"version": 2}, {}, "version 2"),
        ({"version": "9" * 5000}, {}, "version '9999"),
        ({"format": "x" * 5000}, {}, "not a fedveil capture"),
    ],
    ids=str,
)
def test_files_that_lie_are_refused_in_one_line(
    tmp_path: Path, header: dict[str, object], tensors: dict[str, torch.Tensor | None], said: str
) -> None:
    a_capture().save(tmp_path / "one")
    rewritten(tmp_path / "one", header=header, **tensors)
    with pytest.raises(FedveilError, match=said) as caught:
        Capture.load(tmp_path / "one")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "one") in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("damage", ["cut", "magic", "empty", "header cut", "no header", "pickle", "not json", "deep"])
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "one"
    a_capture().save(path)
    content = path.read_bytes()
    if damage == "no header":
        safetensors.torch.save_file({"before/w": torch.ones(1)}, path)
    elif damage == "not json":
        safetensors.torch.save_file({"before/w": torch.ones(1)}, path, metadata={"fedveil": "{"})
    elif damage == "deep":
        safetensors.torch.save_file({"before/w": torch.ones(1)}, path, metadata={"fedveil": "[" * 100_000})
    elif damage == "pickle":
        torch.save({"before/w": torch.ones(1)}, path)
    else:
        changed = {"cut": content[:-5], "magic": b"\xff" * 16 + content[16:], "empty": b"", "header cut": content[:40]}
        path.write_bytes(changed[damage])
    with pytest.raises(FedveilError, match="capture") as caught:
        Capture.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="there is no fedveil capture"):
        Capture.load(tmp_path / "none")
    with pytest.raises(FedveilError, match="fedveil capture"):
        Capture.load(tmp_path)


def test_check_names_the_first_misfit() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    fit = {name: p.detach() for name, p in model.named_parameters()}
    plain: dict[str, object] = {"buffers": None, "buffers_before": None}
    a_capture(before=fit, shared=fit, **plain).check(model)
    with pytest.raises(FedveilError, match="no trained parameter 'w'"):
        a_capture().check(model)
    wide = {**fit, "0.weight": torch.ones(2, 4)}
    with pytest.raises(FedveilError, match=r"0.weight is \(2, 4\) in the update and \(2, 3\) in the model"):
        a_capture(before=wide, shared=wide, **plain).check(model)
    part = {"0.bias": fit["0.bias"]}
    with pytest.raises(FedveilError, match=r"parameter '0.weight' is not in the update"):
        a_capture(before=part, shared=part, **plain).check(model)
    with pytest.raises(FedveilError, match="no buffer 'mean'"):
        a_capture(before=fit, shared=fit).check(model)


def test_a_captured_update_is_read_from_its_files_on_demand(tmp_path: Path) -> None:
    images = torch.rand(8, 1, 4, 4)
    truth = Truth(images, torch.arange(8), images + 1)
    held = Captured(a_capture(), truth)
    assert held.capture.round == held.round == 1
    stored = held.saved(tmp_path / "capture", tmp_path / "truth")
    assert not any(isinstance(value, Capture | Truth) for value in vars(stored).values())
    assert (stored.client, stored.round) == (3, 1)
    assert_rows_equal(stored.capture.shared, held.capture.shared)
    assert torch.equal(leaves(stored.truth.seen)[None], images + 1)
    other = Captured.stored(2, 1, tmp_path / "capture", tmp_path / "truth")
    with pytest.raises(FedveilError, match="is of client 3 in round 1, not of client 2 in round 1"):
        _ = other.capture
    (tmp_path / "truth").unlink()
    with pytest.raises(FedveilError, match="there is no fedveil truth"):
        _ = stored.truth


# ---- what a run captures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_the_clients_side_is_nowhere_in_the_file(tmp_path: Path, protocol: str) -> None:
    task = small_task(sizes=(10, 10))
    settings = replace(FEDAVG, protocol=protocol)  # type: ignore[arg-type]
    done = federate(task, Shift(), settings, seed=123456789, backend="stacked", folder=tmp_path)
    for captured in done.captured:
        number = captured.capture.client
        content = (tmp_path / "captures" / f"round-0001-client-{number:04}.safetensors").read_bytes()
        for inputs in (captured.truth.inputs, captured.truth.seen):
            for example in leaves(inputs)[None]:
                for start in range(len(example) - 1):
                    assert example[start : start + 2].numpy().tobytes() not in content
        assert captured.truth.targets.numpy().tobytes() not in content
        assert b"123456789" not in content  # with the seed one could draw the noise again
        truth = Truth.load(tmp_path / "truths" / f"round-0001-client-{number:04}.safetensors")
        assert torch.equal(truth.targets, captured.truth.targets)
        assert torch.equal(leaves(truth.seen)[None], leaves(captured.truth.seen)[None])
        Capture.load(tmp_path / "captures" / f"round-0001-client-{number:04}.safetensors").check(task.model)


def test_a_captured_gradient_is_that_of_its_truth() -> None:
    task = small_task(norm=False)
    settings = Federation(rounds=2, batch_size=5, record_rounds=(2,), record_clients=2)
    done = federate(task, Shift(), settings, backend="stacked")
    assert [c.capture.client for c in done.captured] == [0, 1]
    for captured in done.captured:
        live = {n: w.clone().requires_grad_() for n, w in captured.capture.before.items()}
        output = torch.func.functional_call(task.model, live, (captured.truth.seen,))
        task.loss(output, captured.truth.targets).backward()
        assert_rows_close(captured.capture.shared, {n: w.grad for n, w in live.items()})  # type: ignore[misc]
        inputs, targets = captured.truth.inputs, captured.truth.targets
        assert captured.capture.batch_sizes == (5,)
        places = task.clients[captured.capture.client]
        assert all((task.train.batch(places)[0] == row).all(1).any() for row in inputs)  # type: ignore[attr-defined]
        assert len(targets) == 5
        assert captured.capture.facts["loss"] == "cross_entropy"


@pytest.mark.parametrize("upload", ["weights", "delta"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_pseudo_gradient_undoes_local_steps(upload: str, momentum: float) -> None:
    """With one step the pseudo-gradient is the gradient; with more it is their weighted mean."""
    task = small_task(norm=False, sizes=(10, 7))
    settings = replace(FEDAVG, batch_size=10, upload=upload, momentum=momentum, lr=0.05)  # type: ignore[arg-type]
    done = federate(task, None, settings, backend="stacked")
    for captured in done.captured:
        live = {n: w.clone().requires_grad_() for n, w in captured.capture.before.items()}
        output = torch.func.functional_call(task.model, live, (captured.truth.inputs,))
        task.loss(output, captured.truth.targets).backward()
        found = pseudo_gradient(captured.capture)
        assert_rows_close(found, {n: w.grad for n, w in live.items()}, 1e-4)  # type: ignore[misc]
    several = federate(task, None, replace(settings, batch_size=4), backend="stacked").captured[0].capture
    assert several.steps == 3
    assert several.batch_sizes == (4, 4, 2)
    total = step_weight(several.lr, several.momentum)
    assert total == pytest.approx(0.05 * (3 if not momentum else 1 + 1.9 + 2.71))
