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
from fedveil.federation.capture import Capture, Captured, Truth, pseudo_gradient, stack, step_weight
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import own_row
from fedveil.tasks.inputs import leaves
from fedveil.tree import Tree

from .small import Shift, assert_rows_close, assert_rows_equal, small_task

FEDAVG = FederationSettings(protocol="fedavg", rounds=1, batch_size=5, record_rounds=(1,))


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
        "facts": {"loss": "cross_entropy", "mean": [0.5], "std": [0.2], "classes": 10, "defense": "none"},
    }
    return Capture(**{**fields, **changed})  # type: ignore[arg-type]


def rewritten(
    path: Path, *, sealed: bool = False, header: dict[str, object] | None = None, **tensors: torch.Tensor | None
) -> Path:
    """The file with some header fields or tensors replaced (None: removed)."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    found = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedveil"])
    held = safetensors.torch.load(content)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    if not sealed:
        found.pop("sha256")  # as a program would write it that knows nothing of it
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


def test_the_hash_of_a_capture_is_the_one_that_its_file_carries(tmp_path: Path) -> None:
    made = a_capture()
    made.save(tmp_path / "one")
    with safetensors.safe_open(tmp_path / "one", framework="pt") as file:
        assert json.loads(file.metadata()["fedveil"])["sha256"] == made.content
    assert Capture.load(tmp_path / "one").content == made.content
    assert replace(made, client=4).content != made.content


def test_the_order_of_the_tensors_is_kept(tmp_path: Path) -> None:
    row = {name: torch.ones(size) for size, name in enumerate(("z", "a", "m", "b"), 1)}
    a_capture(before=row, shared=row).save(tmp_path / "one")
    assert list(Capture.load(tmp_path / "one").shared) == ["z", "a", "m", "b"]
    rewritten(tmp_path / "one")  # as another program would write it, which knows nothing of the order
    assert sorted(Capture.load(tmp_path / "one").shared) == ["a", "b", "m", "z"]


@pytest.mark.parametrize("read", [Capture, Truth])
def test_a_flipped_bit_is_noticed(tmp_path: Path, read: type[Capture] | type[Truth]) -> None:
    path = tmp_path / "one"
    thing = a_capture() if read is Capture else Truth(torch.rand(8, 4), torch.arange(8), torch.rand(8, 4))
    thing.save(path)
    content = path.read_bytes()
    for place in (-1, -50):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place:][1:])
        with pytest.raises(FedveilError, match="damaged: its contents do not match their hash"):
            read.load(path)


def test_a_number_that_was_changed_is_noticed(tmp_path: Path) -> None:
    a_capture().save(tmp_path / "one")
    with pytest.raises(FedveilError, match="do not match their hash"):
        Capture.load(rewritten(tmp_path / "one", sealed=True, header={"lr": [0.2]}))
    with pytest.raises(FedveilError, match="sha256"):
        Capture.load(rewritten(tmp_path / "one", sealed=True, header={"sha256": 3}))
    assert Capture.load(rewritten(tmp_path / "one", sealed=True, header={"sha256": None})).lr == (0.2,)


def test_tensors_lie_where_torch_puts_its_own(tmp_path: Path) -> None:
    """Else kernels round otherwise than in the run that was never stopped."""
    odd = {name: torch.rand(size) for name, size in (("a", 3), ("b", 5), ("c", 1), ("d", 7))}
    Captured(a_capture(before=odd, shared=odd), Truth(torch.rand(3, 5), torch.arange(3), torch.rand(3, 5))).saved(
        tmp_path / "capture", tmp_path / "truth"
    )
    capture, truth = Capture.load(tmp_path / "capture"), Truth.load(tmp_path / "truth")
    rows = (capture.before, capture.shared, capture.buffers, capture.buffers_before)
    tensors = [tensor for row in rows for tensor in (row or {}).values()]
    tensors += [truth.targets, leaves(truth.inputs)[None], leaves(truth.seen)[None]]
    assert [tensor.data_ptr() % 64 for tensor in tensors] == [0] * 15
    assert torch.empty(5).data_ptr() % 64 == 0  # torch's own
    assert own_row(Tree.stack([odd, odd]), 1)["b"].data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"kind": "grad"}, "kind must be 'gradient', 'weights' or 'delta'"),
        ({"client": 1.5}, "client must be a valid integer"),
        ({"batch_sizes": (2.5,)}, "batch_sizes.0 must be a valid integer"),
        ({"batch_sizes": 8}, "lr and batch_sizes must be lists"),
        ({"momentum": "much"}, "momentum must be a valid number"),
        ({"before": None}, "before must be tensors by name, not NoneType"),
        ({"shared": {"w": [1.0], "b": torch.zeros(2)}}, "shared has w, which is not a tensor"),
        (
            {"shared": {"w": torch.ones(2, 3).to_sparse(), "b": torch.zeros(2)}},
            "shared has w, which is not a plain tensor",
        ),
        ({"before": {"w": torch.ones(2, device="meta")}}, "before has w, which is not a plain tensor"),
        ({"before": {"w": torch.ones(2).to(torch.float8_e5m2)}} | {"shared": {"w": torch.ones(2)}}, "float8"),
        ({"facts": {"shape": {1, 2}}}, "facts must be what JSON can hold"),
        ({"facts": {"when": 1j}}, "facts must be what JSON can hold"),
        ({"facts": None}, "facts must be a valid dictionary"),
    ],
    ids=lambda value: f"{value!s:.60}",
)
def test_captures_that_lie_cannot_be_made(changed: dict[str, object], said: str) -> None:
    with pytest.raises(FedveilError, match=said) as caught:
        a_capture(**changed)
    assert "not a valid capture" in str(caught.value)


@pytest.mark.parametrize(
    "inputs, targets, seen, said",
    [
        (torch.rand(3, 2), torch.tensor(1), torch.rand(3, 2), "differ in their number"),
        (torch.rand(3, 2), torch.arange(3), torch.rand(3, 3), "differ in shape"),
        (torch.rand(3, 2), torch.arange(3), {"a": torch.rand(3, 2)}, "differ in shape"),
        (
            torch.full((3, 2), torch.nan),
            torch.arange(3),
            torch.rand(3, 2),
            r"not finite \(NaN or infinity\) in inputs",
        ),
        (
            torch.rand(3, 2),
            torch.arange(3),
            torch.full((3, 2), torch.inf),
            r"not finite \(NaN or infinity\) in seen",
        ),
    ],
)
def test_truths_that_lie_cannot_be_made(
    inputs: torch.Tensor, targets: torch.Tensor, seen: torch.Tensor, said: str
) -> None:
    with pytest.raises(FedveilError, match=said):
        Truth(inputs, targets, seen)


def test_names_may_hold_slashes(tmp_path: Path) -> None:
    row = {"a/b": torch.ones(1)}
    a_capture(before=row, shared=row).save(tmp_path / "one")
    assert_rows_equal(Capture.load(tmp_path / "one").shared, row)


@pytest.mark.parametrize(
    "header, tensors, said",
    [
        ({}, {"shared/w": None}, "shared has no w"),
        ({}, {"before/w": None, "before/b": None}, "no 'before' tensors"),
        ({}, {"shared/w": torch.ones(3, 2)}, "shape"),
        ({}, {"shared/b": torch.ones(2, dtype=torch.float64)}, "float64"),
        ({}, {"shared/b": torch.ones(2, dtype=torch.int64), "before/b": torch.ones(2, dtype=torch.int64)}, "floating"),
        ({}, {"shared/b": torch.tensor([1.0, float("nan")])}, r"shared is not finite \(NaN or infinity\) in b"),
        ({}, {"before/b": torch.tensor([1.0, float("inf")])}, r"before is not finite \(NaN or infinity\) in b"),
        ({}, {"buffers/mean": torch.tensor([1.0, float("nan")])}, r"buffers is not finite \(NaN or infinity\) in mean"),
        ({}, {"buffers/mean": torch.ones(5)}, "buffers has mean of shape"),
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
        ({"batch_sizes": [10**7]}, {}, "batch_sizes.0 must be less than or equal to 1000000"),
        ({"steps": 10**6}, {}, "steps must be less than or equal to 100000"),
        ({"kind": "weights", "steps": 2, "lr": [1e308] * 2, "batch_sizes": [1, 1]}, {}, "lr is too large"),
        ({"facts": {"weight_decay": "x"}}, {}, "among its facts, weight_decay must be a valid number"),
        ({"facts": {"weight_decay": float("nan")}}, {}, "facts must be what JSON can hold"),
        ({"facts": {"weight_decay": -1}}, {}, "weight_decay must be greater than or equal to 0"),
        ({"facts": {"weight_decay": 10**400}}, {}, "weight_decay"),
        ({"facts": {"own": float("inf")}}, {}, "facts must be what JSON can hold"),
        ({"facts": {"shape": [1, 0, 4]}}, {}, "shape.1 must be greater than or equal to 1"),
        ({"facts": {"shape": [1.5]}}, {}, "shape.0 must be a valid integer"),
        ({"facts": {"shape": [True]}}, {}, "shape.0 must be a valid integer"),
        ({"facts": {"shape": "444"}}, {}, "shape must be a valid list"),
        ({"facts": {"shape": [2**30] * 3}}, {}, "shape is of more numbers than any input has"),
        ({"facts": {"shape": [1] * 9}}, {}, "shape"),
        ({"facts": {"classes": 2**40}}, {}, "classes must be less than"),
        ({"facts": {"classes": "x" * 5000}}, {}, "classes"),
        ({"facts": {"model": 3}}, {}, "model must be a name"),
        ({"facts": {"loss": 3}}, {}, "loss must be a valid string"),
        ({"facts": {"mean": "x", "std": [1]}}, {}, "mean must be a valid list"),
        ({"facts": {"mean": [0.5]}}, {}, "mean and std must be given together"),
        ({"facts": {"mean": [0.5], "std": [0]}}, {}, "std.0 must be greater than 0"),
        ({"facts": {"mean": [0.5], "std": [1, 1]}}, {}, "equally many channels"),
        ({"facts": {"mean": [0.5], "std": [1], "shape": [3, 4, 4]}}, {}, "of 1 channels, but an input's shape"),
        ({"facts": {"std": [10**400], "mean": [0]}}, {}, "std"),
        ({"facts": {"defense": [1] * 5000}}, {}, "defense must be a valid string"),
        ({"facts": {"local_epochs": "two"}}, {}, "local_epochs must be a valid integer"),
        ({"facts": {"local_epochs": 2}}, {}, "its 1 steps cannot be those of 2 local epochs"),
        ({"facts": {"buffers": "theirs"}}, {}, "buffers must be 'shared', 'local' or 'recalibrated'"),
        ({"facts": ["shape"]}, {}, "facts must be an object"),
        ({"format": "fedveil-truth"}, {}, "not a fedveil capture"),
        ({"version": 2}, {}, "version 2"),
        ({"version": "9" * 5000}, {}, "version '9999"),
        ({"format": "x" * 5000}, {}, "not a fedveil capture"),
    ],
    ids=lambda value: f"{value!s:.60}",
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
    settings = FederationSettings(rounds=2, batch_size=5, record_rounds=(2,), record_clients=2)
    done = federate(task, Shift(), settings, backend="stacked")
    assert [c.capture.client for c in done.captured] == [0, 1]
    for captured in done.captured:
        live = {n: w.clone().requires_grad_() for n, w in captured.capture.before.items()}
        output = torch.func.functional_call(task.model, live, (captured.truth.seen,))
        task.loss(output, captured.truth.targets).backward()
        assert_rows_close(captured.capture.shared, {n: w.grad for n, w in live.items()})  # type: ignore[misc]
        inputs, targets = captured.truth.inputs, captured.truth.targets
        assert captured.capture.batch_sizes == (5,)
        indices = task.clients[captured.capture.client]
        assert all((task.train.batch(indices)[0] == row).all(1).any() for row in inputs)  # type: ignore[attr-defined]
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


def test_captures_are_rows_of_updates() -> None:
    local: dict[str, object] = {"kind": "weights", "facts": {"weight_decay": 0.01, "local_epochs": 2}, "momentum": 0.5}
    local |= {"steps": 2, "lr": (0.1, 0.1), "batch_sizes": (3, 3)}
    two = [a_capture(**local) for _ in range(2)]
    found = stack(two)
    assert (found.kind, found.count, found.steps, found.examples) == ("weights", 2, 2, 3)
    assert (found.momentum, found.weight_decay, found.local_epochs) == (0.5, 0.01, 2)
    assert found.before.repeated  # of equal weights there is one copy
    for row, capture in enumerate(two):
        assert_rows_equal(found.message.row(row), capture.shared)
        assert_rows_equal(found.before.row(row), capture.before)
        assert_rows_equal(found.buffers.row(row), capture.buffers_before)  # type: ignore[arg-type]
        assert_rows_equal(found.gradient.row(row), pseudo_gradient(capture))
    moved = a_capture(before={"w": torch.zeros(2, 3), "b": torch.zeros(2)}, **local)
    apart = stack([two[0], moved])
    assert not apart.before.repeated
    assert_rows_equal(apart.before.row(1), moved.before)
    assert stack([a_capture(facts={"weight_decay": 0.01})]).weight_decay == 0  # the server's: it is not in a gradient


def test_buffers_that_a_capture_does_not_tell_are_the_models() -> None:
    bare = a_capture(buffers=None, buffers_before=None)
    assert not len(stack([bare, bare]).buffers)
    own = {"mean": torch.full((2,), 7.0), "steps": torch.tensor(0)}
    found = stack([bare, a_capture()], own).buffers
    assert_rows_equal(found.row(0), own)
    assert_rows_equal(found.row(1), {"mean": torch.zeros(2), "steps": torch.tensor(2)})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"lr": (0.2,)}, r"lr is \(0.1,\) and \(0.2,\)"),
        ({"batch_sizes": (4,)}, "batch_sizes is"),
        ({"facts": {"weight_decay": 0.5}}, "weight_decay is None and 0.5"),
        ({"kind": "delta"}, "kind is gradient and delta"),
        ({"before": {"w": torch.ones(2, 3)}, "shared": {"w": torch.ones(2, 3)}}, "of their parameters differ"),
        ({"buffers": None, "buffers_before": None}, "of their buffers differ"),
    ],
)
def test_captures_that_differ_are_not_stacked(changed: dict[str, object], line: str) -> None:
    with pytest.raises(FedveilError, match=f"must be alike: .*{line}"):
        stack([a_capture(), a_capture(**changed)])


def test_nothing_is_not_stacked() -> None:
    with pytest.raises(FedveilError, match="no captured update"):
        stack([])
