"""A run that is stopped or killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedveil.signals import STOPPING, Signaled, heard
from waiting import gone, wait_for

from .console import SMALL, Fedveil, environment, files, program, refused, run_program

LONG = (*SMALL, "--rounds", "24", "--victims", "2", "--attack", "inverting-gradients:steps=6", "--candidates", "10")
DEFENDED = ("--defense", "gradient-dropout", "--backend", "stacked", "--seed", "4")


def _hear_everything() -> None:
    """A shell's background jobs ignore Ctrl-C and those of nohup SIGHUP, and so does what they start."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def begin(*arguments: str | Path, cwd: Path, until: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    """Start a command, and wait until it has written a file if one is named."""
    running = subprocess.Popen(
        program(*arguments),
        cwd=cwd,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as in a terminal of its own: its processes are one group
        preexec_fn=_hear_everything,
    )
    if until is not None:
        wait_for(until.exists, failed=lambda: running.poll() is not None and running.communicate())
    return running


def numbers(folder: Path) -> dict[str, Any]:
    """All of a result that is not time."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    cost = {key: result["cost"][key] for key in ("rounds", "defended", "undefended", "difference", "history")}
    return {"rows": result["rows"], "cost": cost, "config": result["provenance"]["config"]}


def test_killed_in_training_it_goes_on_to_the_same_numbers(fedveil: Fedveil, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    running = begin("audit", *LONG, *DEFENDED, "--out", "killed", cwd=tmp_path)
    wait_for(lambda: len(trained(tmp_path)) == 1 and unfinished(tmp_path) is not None)  # the second run has begun
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    assert not (out / "result.json").exists()

    refused(fedveil("audit", *LONG, *DEFENDED, "--out", "killed"), "half-done run of this configuration", "--resume")
    refused(
        fedveil("audit", *LONG, *DEFENDED, "--lr", "0.3", "--out", "killed", "--resume"),
        "half-done run of another configuration",
        "federation lr was 0.1, is now 0.3",
    )
    (entry,) = trained(tmp_path)
    assert "24 rounds under none" in header(entry / "entry.safetensors")["about"]

    resumed = fedveil("audit", "--config", "killed/config.toml", "--resume")
    assert resumed.code == 0, resumed.err
    assert resumed.err.count("training: round 24/24") == 1  # the undefended run was finished: it is not done again
    whole = fedveil("audit", *LONG, *DEFENDED, "--out", "whole", "--store", "none", "--quiet")
    assert whole.code == 0, whole.err
    assert numbers(out) == numbers(tmp_path / "whole")


def trained(folder: Path) -> list[Path]:
    """The finished runs in the store."""
    return [path for path in (folder / "fedveil-out/store/train").glob("*") if (path / "entry.safetensors").exists()]


def unfinished(folder: Path) -> Path | None:
    """The checkpoint of a run that is not finished."""
    return next((folder / "fedveil-out/store/train").glob("*.unfinished/*/checkpoint.safetensors"), None)


def header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    told: dict[str, Any] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["fedveil"])
    return told


@pytest.mark.parametrize("command", ["audit", "train"])
def test_ctrl_c_says_how_to_go_on_and_leaves_nothing_half_written(tmp_path: Path, command: str) -> None:
    options = LONG if command == "audit" else SMALL
    folder = tmp_path / "out put"  # with a space, which the line must quote
    running = begin(command, *options, "--rounds", "300", "--quiet", "--out", folder.name, cwd=tmp_path)
    own = folder / "checkpoint.safetensors"
    wait_for(lambda: own.exists() if command == "train" else unfinished(tmp_path) is not None)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate()
    assert (running.returncode, out) == (130, "")
    assert err == f"fedveil: stopped; go on with: fedveil {command} --config 'out put/config.toml' --resume\n"
    assert set(files(folder)) == {"config.toml"} | ({own.name} if command == "train" else set())
    left = [path.name for path in (tmp_path / "fedveil-out").rglob("*") if path.name.startswith(".")]
    assert left == []  # no part of a file; locks are given back


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_for_all_processes_ends_them_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    options = (*SMALL, "--protocol", "fedavg", "--workers", "2", "--rounds", "3000", "--quiet", "--out", "out")
    checkpoint = tmp_path / "out/checkpoint.safetensors"
    with tempfile.TemporaryDirectory() as temporary:  # short, so that workers are forked from a server
        # Torch makes a folder for compiled code, whether there is any or not.
        own = {"TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
        running = begin("train", *options, cwd=tmp_path, until=checkpoint, **own)
        os.killpg(running.pid, number)
        out, err = running.communicate()
        assert (running.returncode, out) == (128 + number, "")
        assert err == "fedveil: stopped; go on with: fedveil train --config out/config.toml --resume\n"
        assert set(files(tmp_path)) == {"out/config.toml", "out/checkpoint.safetensors"}
        assert list(Path(temporary).iterdir()) == []
        wait_for(lambda: group_ended(running.pid))


def group_ended(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return all(gone(process) for process in map(int, filter(str.isdecimal, os.listdir("/proc"))) if of(process, group))


def of(process: int, group: int) -> bool:
    try:
        return os.getpgid(process) == group
    except ProcessLookupError:
        return False


def test_signals_of_a_python_process_are_its_own(fedveil: Fedveil) -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    assert fedveil("train", *SMALL, "--rounds", "1", "--quiet").code == 0
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_two_runs_do_not_share_a_folder(fedveil: Fedveil, tmp_path: Path) -> None:
    options = (*SMALL, "--rounds", "3000", "--out", "out")
    running = begin("train", *options, cwd=tmp_path, until=tmp_path / "out/checkpoint.safetensors")
    try:
        for again in ((), ("--resume",), ("--overwrite",)):
            said = fedveil("train", *options, *again)
            refused(said, "out is in use by", f"process {running.pid}, since 20", "--rounds 3000")
        refused(fedveil("report", "out"), "out is in use by")
        refused(fedveil("report", "out", "--path", "page.html"), "holds no result")  # this only reads
    finally:
        running.kill()
        running.communicate()
    assert "config.toml" in files(tmp_path / "out")
    refused(fedveil("train", *options), "half-done run of this configuration")


@pytest.mark.parametrize(
    "command, options",
    [
        ("train", ("--protocol", "fedavg", "--lr", "1e38")),  # refused in the first round
        ("train", ("--workers", "2")),  # refused by the federation
        ("audit", ("--lpips", "alex")),  # there are no weights
    ],
)
def test_a_refused_run_leaves_the_folder_as_it_was(
    fedveil: Fedveil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "no weights"))
    said = fedveil(command, *SMALL, "--rounds", "2", *options, "--quiet", "--out", "out")
    refused(said)
    assert list(tmp_path.iterdir()) == []
    assert fedveil("train", *SMALL, "--rounds", "1", "--quiet", "--out", "out").code == 0
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path / "out")}
    if "--lr" not in options:  # that run had begun to replace the other
        refused(fedveil(command, *SMALL, "--rounds", "2", *options, "--quiet", "--out", "out", "--overwrite"))
        assert {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path / "out")} == before


def test_a_resumed_training_equals_one_in_one_go(fedveil: Fedveil, tmp_path: Path) -> None:
    options = (*SMALL, "--rounds", "30", "--defense", "gradient-dropout", "--backend", "stacked")
    options += ("--record-rounds", "1,30")
    running = begin("train", *options, "--out", "cut", cwd=tmp_path, until=tmp_path / "cut/checkpoint.safetensors")
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert not (tmp_path / "cut/history.json").exists()
    assert fedveil("train", "--config", "cut/config.toml", "--resume", "--quiet").code == 0
    assert fedveil("train", *options, "--out", "whole", "--quiet").code == 0
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    for name in files(tmp_path / "whole"):
        if name.endswith(".safetensors") and not name.startswith("checkpoint"):
            cut, whole = (safetensors.torch.load_file(tmp_path / run / name) for run in ("cut", "whole"))
            assert cut.keys() == whole.keys()
            assert all(torch.equal(cut[key], whole[key]) for key in whole), name


def test_a_damaged_or_foreign_checkpoint_is_refused(fedveil: Fedveil, tmp_path: Path) -> None:
    assert fedveil("train", *SMALL, "--rounds", "2", "--out", "a", "--quiet").code == 0
    assert fedveil("train", *SMALL, "--rounds", "2", "--seed", "9", "--out", "b", "--quiet").code == 0
    checkpoint = tmp_path / "a/checkpoint.safetensors"
    checkpoint.write_bytes((tmp_path / "b/checkpoint.safetensors").read_bytes())
    refused(fedveil("train", "--config", "a/config.toml", "--resume"), "belongs to another run", "seed was 9, is now 0")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    refused(fedveil("train", "--config", "a/config.toml", "--resume"), "damaged")


def test_an_unforeseen_error_is_one_line_too(tmp_path: Path, fedveil: Fedveil, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr("fedveil.cli.runs.train", broken)
    said = fedveil("train", *SMALL, "--quiet")
    assert said.code == 1
    assert said.err == "fedveil: ZeroDivisionError: first second (set FEDVEIL_DEBUG=1 for the traceback)\n"
    monkeypatch.setenv("FEDVEIL_DEBUG", "1")
    assert "Traceback" in fedveil("train", *SMALL, "--quiet").err


def test_a_signal_that_a_library_takes_for_an_error_is_still_one(
    fedveil: Fedveil, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapped(*arguments: object, **options: object) -> None:
        heard.append(Signaled(signal.SIGTERM))
        raise ValueError(f"cannot build: {heard[0]!r}")

    monkeypatch.setattr("fedveil.cli.runs.train", wrapped)
    try:
        said = fedveil("train", *SMALL, "--quiet")
    finally:
        heard.clear()
    assert (said.code, said.err) == (143, "fedveil: stopped\n")


def test_the_program_itself_refuses_in_one_line(tmp_path: Path) -> None:
    refused(run_program("audit", "--data", "digts", cwd=tmp_path), "did you mean 'digits'?")
    assert files(tmp_path) == []
