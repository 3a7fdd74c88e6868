"""Checkpoints: a run that was stopped, or killed, ends as if it had not been."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
from fedveil.federation.run import Run, federate
from fedveil.federation.settings import Federation
from fedveil.tasks.task import Task, task

from .small import Feedback, Noted, Shift, assert_rows_equal, small_task

SETTINGS = Federation(rounds=5, batch_size=5, momentum=0.9, sampling_rate=0.5, record_rounds=(1, 2, 4))
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
    assert torch.equal(one.correct, other.correct)  # type: ignore[arg-type]
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


def interrupted(made: Task, settings: Federation, folder: Path, *stops: int, defense: object = None) -> Run:
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
    settings = Federation(rounds=60, batch_size=4, lr=0.05, patience=4, warmup_rounds=2)
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

    federate(task(1.0), None, Federation(rounds=1), backend="loop", folder=tmp_path)
    federate(task(1.0), None, Federation(rounds=1), backend="loop", folder=tmp_path, resume=True)
    with pytest.raises(FedveilError, match="behavior of model and loss was"):
        federate(task(2.0), None, Federation(rounds=1), backend="loop", folder=tmp_path, resume=True)


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

    settings = Federation(rounds=3, batch_size=4, record_rounds=(1, 2, 3))
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
DIGITS = Federation(rounds=4, batch_size=32, momentum=0.5, record_rounds=(2,), record_clients=1)


def digits() -> Task:
    return task("digits", model="mlp:hidden=[16]", clients=3, limit=300)


def test_a_killed_process_is_resumed_to_the_last_bit(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    described = configuration(digits(), Chain.of("gradient-dropout"), DIGITS, 0)
    progress, machinery = load_checkpoint(tmp_path / "checkpoint.safetensors", Chain.of("gradient-dropout"), described)
    assert [record.round for record in progress.history] == [1, 2]
    assert machinery.backend == "stacked"
    resumed = federate(digits(), "gradient-dropout", DIGITS, folder=tmp_path, resume=True)
    whole = federate(digits(), "gradient-dropout", DIGITS, backend="stacked")
    assert_same_run(whole, resumed)
    assert not list(tmp_path.glob(".*"))
