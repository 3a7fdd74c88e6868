"""Checkpoints: a run that was stopped, or killed, ends as if it had not been."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.nn import functional

from fedveil.defenses.chain import Chain
from fedveil.defenses.fedbarre import FedBARRE
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.spm import SPM
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, Truth
from fedveil.federation.checkpoint import configuration, load_checkpoint
from fedveil.federation.observers import Observer
from fedveil.federation.plan import Plan
from fedveil.federation.run import Run, federate
from fedveil.federation.settings import FederationSettings
from fedveil.tasks.task import Task, task
from fedveil.tensorfile import KEY, ORDER, seal
from fedveil.tensors import read_safetensors
from waiting import PATIENCE

from .small import Feedback, Noted, Shift, assert_rows_equal, small_task

SETTINGS = FederationSettings(rounds=5, batch_size=5, momentum=0.9, sampling_rate=0.5, record_rounds=(1, 2, 4))
SIZES = (13, 8, 2, 19)


class Stop(Exception):
    """Stands for whatever ends a process."""


class StopAt(Observer):
    """Ends the run in the middle of a round."""

    def __init__(self, number: int, step: int = 0) -> None:
        self._at = (number, step)

    def on_step(self, number: int, step: int) -> None:
        if (number, step) == self._at:
            raise Stop


def assert_same_run(one: Run, other: Run) -> None:
    assert_rows_equal(one.params, other.params)
    assert_rows_equal(one.buffers, other.buffers)
    assert torch.equal(one.values, other.values)  # type: ignore[arg-type]
    timeless = [[record.model_copy(update={"seconds": 0}) for record in run.history] for run in (one, other)]
    assert timeless[0] == timeless[1]
    assert (one.chosen_round, one.early_stopped, one.untrained) == (
        other.chosen_round,
        other.early_stopped,
        other.untrained,
    )
    assert len(one.captured) == len(other.captured)
    for mine, theirs in zip(one.captured, other.captured, strict=True):
        assert_rows_equal(mine.capture.shared, theirs.capture.shared)
        assert mine.capture.facts == theirs.capture.facts
        assert torch.equal(mine.truth.targets, theirs.truth.targets)


def interrupted(made: Task, settings: FederationSettings, folder: Path, *stops: int, defense: object = None) -> Run:
    """The run, ended in each of these rounds and resumed."""
    given: dict[str, object] = {"folder": folder, "backend": "stacked", "resume": True}
    for number in stops:
        with pytest.raises(Stop):
            federate(made, defense, settings, observers=[StopAt(number)], **given)  # type: ignore[arg-type]
    return federate(made, defense, settings, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("buffers", ["shared", "local", "recalibrated"])
def test_resumed_runs_are_equal_to_the_last_bit(tmp_path: Path, protocol: str, buffers: str) -> None:
    made = small_task(sizes=SIZES, buffers=buffers)
    settings = replace(SETTINGS, protocol=protocol)  # type: ignore[arg-type]
    defense = Chain((Shift(), Feedback(), GradientDropout()))
    whole = federate(made, defense, settings, backend="stacked")
    assert_same_run(whole, interrupted(made, settings, tmp_path, 1, 3, 3, 5, defense=defense))
    noted = Noted()
    again = federate(made, defense, settings, folder=tmp_path, resume=True, observers=[noted])
    assert noted.calls == [("start", 5), ("finish",), ("stop",)]
    assert_same_run(whole, again)


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_what_stands_beside_the_utility_survives(tmp_path: Path, protocol: str) -> None:
    made = small_task(sizes=SIZES)
    settings = replace(SETTINGS, protocol=protocol, local_utility=2)  # type: ignore[arg-type]
    defense = Chain((Shift(), FedBARRE(models=2, lr=0.5), SPM(epsilon=2.0)))
    whole = federate(made, defense, settings, backend="stacked")
    assert all("randomized ensemble" in record.utility.beside for record in whole.history)
    assert any(record.perturbation is not None for record in whole.history)
    assert_same_run(whole, interrupted(made, settings, tmp_path, 1, 3, defense=defense))


def test_early_stopping_and_warmup_survive(tmp_path: Path) -> None:
    made = small_task(norm=False)
    settings = FederationSettings(rounds=60, batch_size=4, lr=0.05, patience=4, warmup_rounds=2)
    whole = federate(made, Feedback(), settings, backend="stacked")
    assert whole.early_stopped
    last = len(whole.history)
    assert_same_run(whole, interrupted(made, settings, tmp_path, 2, 4, last, defense=Feedback()))


def test_a_fresh_start_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    made = small_task(norm=False)
    federate(made, None, SETTINGS, folder=tmp_path, backend="stacked")
    with pytest.raises(Stop):
        federate(made, None, SETTINGS, folder=tmp_path, backend="stacked", observers=[StopAt(1)], seed=1)
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_the_backend_is_kept(tmp_path: Path) -> None:
    made = small_task(norm=False)
    first = federate(made, None, replace(SETTINGS, rounds=5), folder=tmp_path)  # auto
    with pytest.raises(Stop):
        federate(made, None, SETTINGS, folder=tmp_path, backend="loop", observers=[StopAt(3)])
    resumed = federate(made, None, SETTINGS, folder=tmp_path, resume=True)
    assert resumed.backend == "loop"
    assert first.backend in ("loop", "stacked")
    with pytest.raises(FedveilError, match="made on the backend loop"):
        federate(made, None, SETTINGS, folder=tmp_path, resume=True, backend="stacked")


def test_another_configuration_is_refused_by_what_differs(tmp_path: Path) -> None:
    made = small_task(norm=False)
    federate(made, "gradient-dropout", SETTINGS, folder=tmp_path, backend="stacked")

    def refusal(**changed: object) -> str:
        given: dict[str, object] = {"task": made, "defense": "gradient-dropout", "settings": SETTINGS, "seed": 0}
        with pytest.raises(FedveilError) as caught:
            federate(**{**given, **changed}, folder=tmp_path, resume=True)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "settings lr was 0.1, is now 0.2." in refusal(settings=replace(SETTINGS, lr=0.2))
    assert "seed was 0, is now 4" in refusal(seed=4)
    assert "defense was gradient-dropout, is now gradient-dropout:keep=0.5" in refusal(
        defense="gradient-dropout:keep=0.5"
    )
    assert "task buffers was shared, is now local" in refusal(task=small_task(norm=False, buffers="local"))
    assert "initial model was" in refusal(task=small_task())
    other = small_task(norm=False, sizes=(14, 7, 3, 21))
    assert "clients was" in refusal(task=other)


def test_another_loss_of_the_same_name_is_refused(tmp_path: Path) -> None:
    def task(factor: float) -> Task:
        made = small_task(norm=False)
        data = [made.train.batch(list(range(20))), made.test.batch(list(range(10)))]
        return Task(made.model, tuple(data), clients=2, loss=lambda out, y: factor * functional.cross_entropy(out, y))

    federate(task(1.0), None, FederationSettings(rounds=1), backend="loop", folder=tmp_path)
    federate(task(1.0), None, FederationSettings(rounds=1), backend="loop", folder=tmp_path, resume=True)
    with pytest.raises(FedveilError, match="behavior of model and loss was"):
        federate(task(2.0), None, FederationSettings(rounds=1), backend="loop", folder=tmp_path, resume=True)


def test_saved_captures_take_no_memory(tmp_path: Path) -> None:
    def held(run: Run) -> int:
        """Tensors that the captured updates keep alive."""
        reached, waiting = set(), [vars(each) for each in run.captured]
        count = 0
        while waiting:
            thing = waiting.pop()
            if id(thing) in reached or isinstance(thing, type):
                continue
            reached.add(id(thing))
            count += isinstance(thing, torch.Tensor)
            if isinstance(thing, dict | list | tuple | Capture | Truth):
                waiting += gc.get_referents(thing)
        return count

    settings = FederationSettings(rounds=3, batch_size=4, record_rounds=(1, 2, 3))
    kept = federate(small_task(norm=False), None, settings, backend="loop", folder=tmp_path)
    assert held(kept) == 0
    free = federate(small_task(norm=False), None, settings, backend="loop")
    assert held(free) > 0
    for one, other in zip(kept.captured, free.captured, strict=True):
        assert_rows_equal(one.capture.shared, other.capture.shared)
    resumed = federate(small_task(norm=False), None, settings, backend="loop", folder=tmp_path, resume=True)
    assert held(resumed) == 0
    assert len(resumed.captured) == len(free.captured)
    next((tmp_path / "truths").iterdir()).unlink()
    with pytest.raises(FedveilError, match="there is no fedveil truth"):
        federate(small_task(norm=False), None, settings, backend="loop", folder=tmp_path, resume=True)


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty"])
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, damage: str) -> None:
    made = small_task(norm=False)
    federate(made, None, SETTINGS, folder=tmp_path, backend="stacked")
    path = tmp_path / "checkpoint.safetensors"
    content = path.read_bytes()
    if damage == "foreign":
        safetensors.torch.save_file({"x": torch.ones(3)}, path)
    else:
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        path.write_bytes({"cut": content[:-100], "flipped": flipped, "empty": b""}[damage])
    with pytest.raises(FedveilError, match=r"damaged|is not a fedveil checkpoint") as caught:
        federate(made, None, SETTINGS, folder=tmp_path, resume=True)
    assert "\n" not in str(caught.value)


# ---- forged ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def forged(path: Path, change: Change) -> None:
    """The checkpoint with other contents and a hash that is right."""
    metadata, tensors = read_safetensors(path)
    header = json.loads(metadata[KEY])
    change(header, tensors)
    header["sha256"] = seal(json.dumps(header), tensors)
    # NaN and infinity, too, as Python writes them
    safetensors.torch.save_file(tensors, path, {KEY: json.dumps(header), ORDER: json.dumps(list(tensors))})


def renamed(old: str, new: str) -> Change:
    return lambda header, tensors: tensors.update({new: tensors.pop(old)})


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda header, tensors: tensors.update({name: tensor})


def record(number: int, **fields: object) -> Change:
    return lambda header, tensors: header["history"][number].update(fields)


def said(**fields: object) -> Change:
    return lambda header, tensors: header.update(fields)


WEIGHT, MEAN = "0.weight", "1.running_mean"
FORGERIES: dict[str, tuple[Change, str]] = {
    "weight missing": (lambda h, t: t.pop(f"params/{WEIGHT}"), "'0.weight' is missing from the weights"),
    "weight too many": (put("params/x", torch.ones(2)), "'x' is no part of the weights"),
    "weight renamed": (renamed(f"params/{WEIGHT}", "params/"), "the weights"),
    "all weights": (lambda h, t: [t.pop(n) for n in list(t) if n.startswith("params/")], "missing from the weights"),
    "weight's shape": (put(f"params/{WEIGHT}", torch.ones(6, 5)), r"has shape \(6, 5\) in the weights, not \(5, 6\)"),
    "weight's type": (put(f"params/{WEIGHT}", torch.ones(5, 6).double()), "is torch.float64 in the weights"),
    "weight of 8 bits": (put(f"params/{WEIGHT}", torch.ones(5, 6).to(torch.float8_e4m3fn)), "float8"),
    "weight is NaN": (put(f"params/{WEIGHT}", torch.full((5, 6), torch.nan)), "holds NaN or infinity"),
    "buffer missing": (lambda h, t: t.pop(f"buffers/{MEAN}"), "is missing from the buffers"),
    "buffer infinite": (put(f"buffers/{MEAN}", torch.full((5,), torch.inf)), "holds NaN or infinity"),
    "momentum missing": (lambda h, t: t.pop(f"velocity/{WEIGHT}"), "is missing from the momentum"),
    "momentum's shape": (put(f"velocity/{WEIGHT}", torch.ones(5)), "in the momentum"),
    "foreign part": (put("more/x", torch.ones(1)), "it holds 'more', which none has"),
    "no part": (put("x", torch.ones(1)), "it holds 'x', which none has"),
    "own buffers": (put("local/0/x", torch.ones(1)), "holds clients' own buffers, and the task has none"),
    "own buffers of nobody": (put("local/-1/x", torch.ones(1)), "'-1' is not the number of a client"),
    "memory of nobody": (put("state/x/1/y", torch.ones(1)), "'x' is not the number of a client"),
    "memory of client 4": (put(f"state/4/1/{WEIGHT}", torch.ones(5, 6)), "tells of client 4, and they are 0 to 3"),
    "memory of no place": (put("state/0/9/x", torch.ones(1)), "memory '0/9/x' is of no defense"),
    "memory of round": (put("state/0/0/x", torch.ones(1)), "memory '0/0/x' is of no defense"),
    "memory without a name": (put("state/0/1", torch.ones(1)), "memory '0/1' is of no defense"),
    "memory's shape": (put(f"state/0/1/{WEIGHT}", torch.ones(7)), "what client 0 remembers is nothing for"),
    "memory is NaN": (put(f"state/0/1/{WEIGHT}", torch.full((5, 6), torch.nan)), "'0.weight' that client 0 remembers"),
    "best model": (put("best_params/x", torch.ones(1)), "holds a best model, and none was looked for"),
    "best buffers": (put("best_buffers/x", torch.ones(1)), "a best model's buffers without its weights"),
    "best round": (said(best_round=1), "its best round is 1, and by its history none"),
    "best round of none": (said(best_round=-1), "its best round is -1"),
    "stopped": (said(stopped=True), "it has stopped early, against its history"),
    "chunk": (said(chunk=-1), "it stacks -1 clients at a time"),
    "large chunk": (said(chunk=10**9), "it stacks 1000000000 clients"),
    "backend": (said(backend="auto"), "backend must be"),
    "no history": (said(history=[]), "it tells of 0 rounds, not 1 to 5"),
    "history is no list": (said(history=3), "history must be"),
    "untrained": (said(untrained={"test": 7}), "a utility of the untrained model is 7.0, no fraction"),
    "round's number": (record(1, round=7), "round 2 is called 7"),
    "more rounds": (lambda h, t: h["history"].extend(h["history"] * 3), "it tells of 8 rounds"),
    "round's clients": (record(0, clients=[0, 99]), "the clients of round 1 are others"),
    "round without clients": (record(0, clients=[]), "the clients of round 1 are others"),
    "round's loss": (record(0, train_loss=float("nan")), "the loss of round 1 is nan"),
    "round's seconds": (record(0, seconds=-1), "seconds of round 1 is -1"),
    "round's bytes": (record(0, bytes_up=10**30), "bytes_up of round 1 is 1000"),
    "round's utility": (record(0, utility={"test": -0.5}), "a utility of round 1 is -0.5"),
    "round's metric": (record(0, utility={"metric": "AUROC"}), "round 1 is measured by AUROC, others by accuracy"),
    "no hash": (lambda h, t: h.update(version=2), ""),
}


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged")
    with pytest.raises(Stop):
        federate(small_task(sizes=SIZES), FORGED, SETTINGS, folder=folder, backend="stacked", observers=[StopAt(3)])
    return folder


FORGED = Chain((Shift(), Feedback()))


@pytest.mark.parametrize("name", FORGERIES)
def test_a_checkpoint_with_a_right_hash_and_wrong_contents_is_one_line(
    tmp_path: Path, two_rounds: Path, name: str
) -> None:
    change, line = FORGERIES[name]
    shutil.copytree(two_rounds, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    forged(path, change)
    made = small_task(sizes=SIZES)
    if not line:  # sealed again without any change: it goes on
        federate(made, FORGED, SETTINGS, folder=path.parent, resume=True)
        return
    with pytest.raises(FedveilError, match=line) as caught:
        federate(made, FORGED, SETTINGS, folder=path.parent, resume=True)
    assert str(path) in str(caught.value)


def test_a_checkpoint_without_its_hash_is_refused(tmp_path: Path, two_rounds: Path) -> None:
    shutil.copytree(two_rounds, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    metadata, tensors = read_safetensors(path)
    header = json.loads(metadata[KEY])
    safetensors.torch.save_file(tensors, path, {KEY: json.dumps({**header, "sha256": None})})
    with pytest.raises(FedveilError, match="its hash is missing"):
        federate(small_task(sizes=SIZES), FORGED, SETTINGS, folder=path.parent, resume=True)


def test_a_best_model_must_follow_from_the_history(tmp_path: Path) -> None:
    made = small_task(norm=False)
    settings = FederationSettings(rounds=4, batch_size=4, lr=0.05, patience=4)
    federate(made, None, settings, folder=tmp_path, backend="stacked")
    path = tmp_path / "checkpoint.safetensors"
    whole = path.read_bytes()
    for change, line in (
        (said(best_round=9), "its best round is 9, and by its history"),
        (lambda h, t: [t.pop(n) for n in list(t) if n.startswith("best")], "its best model is missing"),
        (put("best_params/0.weight", torch.ones(2)), "in the best weights"),
        (put("best_buffers/x", torch.ones(2)), "no part of the best buffers"),
    ):
        path.write_bytes(whole)
        forged(path, change)
        with pytest.raises(FedveilError, match=line):
            federate(made, None, settings, folder=tmp_path, resume=True)


def test_weights_go_on_where_torch_puts_its_own(two_rounds: Path) -> None:
    """Else kernels round otherwise than in the run that was never stopped."""
    described = configuration(Plan(small_task(sizes=SIZES), FORGED, SETTINGS))
    server = load_checkpoint(two_rounds / "checkpoint.safetensors", FORGED, described).server
    tensors = [tensor for row in (server.params, server.buffers, server.velocity) for tensor in row.values()]
    assert len(tensors) > 9
    assert [tensor.data_ptr() % 64 for tensor in tensors] == [0] * len(tensors)


# ---- killed for real -------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.federation.test_checkpoint import DIGITS, digits
from fedveil.federation.observers import Observer
from fedveil.federation.run import federate

class Kill(Observer):
    def on_step(self, number, step):
        if (number, step) == (3, 2):
            os.kill(os.getpid(), signal.SIGKILL)

federate(digits(), "gradient-dropout", DIGITS, backend="stacked", folder=Path(sys.argv[1]), observers=[Kill()])
"""
DIGITS = FederationSettings(rounds=4, batch_size=32, momentum=0.5, record_rounds=(2,), record_clients=1)


def digits() -> Task:
    return task("digits", model="mlp:hidden=[16]", clients=3, limit=300)


def test_a_killed_process_is_resumed_to_the_last_bit(tmp_path: Path) -> None:
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": path}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        timeout=PATIENCE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    plan = Plan(digits(), Chain.of("gradient-dropout"), DIGITS)
    state = load_checkpoint(tmp_path / "checkpoint.safetensors", plan.chain, configuration(plan))
    assert [record.round for record in state.history] == [1, 2]
    assert state.machinery.backend == "stacked"
    resumed = federate(digits(), "gradient-dropout", DIGITS, folder=tmp_path, resume=True)
    whole = federate(digits(), "gradient-dropout", DIGITS, backend="stacked")
    assert_same_run(whole, resumed)
    assert not list(tmp_path.glob(".*"))
