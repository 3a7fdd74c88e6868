"""`fedveil flower new`: the app that it writes runs over a grid of functions. Flower itself: test_simulation.py."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.config_utils import load_and_validate

from fedveil.cli.main import run
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.flower.keeping import RoundLine
from fedveil.flower.new_app import NewApp, write_app
from flower.grids import FakeGrid


@pytest.fixture
def fresh_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in set(sys.modules) - before:
        if name.startswith("my_app"):
            del sys.modules[name]


def config_of(folder: Path) -> dict[str, Any]:
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert not warnings
    settings: dict[str, Any] = config["tool"]["flwr"]["app"]["config"]
    return settings


@pytest.mark.usefixtures("fresh_modules")
@pytest.mark.parametrize(
    "defense", ["none", "spm:epsilon=8", "gradient-dropout:keep=0.9", "fedem+clip:norm=5,at=upload", "dp-sgd"]
)
def test_a_new_app_trains_under_its_defense(tmp_path: Path, defense: str) -> None:
    folder = tmp_path / "my-app"
    write_app(folder, NewApp(model="mlp:hidden=[8]", defense=defense, clients=2, rounds=2, batch_size=64, lr=0.3))
    run = {**config_of(folder), "out": str(tmp_path / "out"), "record-rounds": "2"}
    sys.path.insert(0, str(folder))
    try:
        client, server = (importlib.import_module(f"my_app.{name}").app for name in ("client", "server"))
    finally:
        sys.path.remove(str(folder))
    grid = FakeGrid(dict.fromkeys(range(2), client), run)
    server(grid, grid.contexts[0])
    lines = [RoundLine.model_validate_json(line) for line in (tmp_path / "out/rounds.jsonl").read_text().splitlines()]
    assert [(line.taken, line.failed) for line in lines] == [([0, 1], {})] * 2
    assert lines[-1].evaluation["accuracy"] > (0.3 if defense == "none" else 0)
    seen = Capture.load(tmp_path / "out/captures/round-0002-client-0001.safetensors")
    assert seen.public.defense == str(Chain.of(defense))


@pytest.mark.parametrize(
    "new, why",
    [
        (NewApp(data="no-such"), "no-such"),
        (NewApp(model="no-such"), "no-such"),
        (NewApp(defense="no-such"), "no-such"),
        (NewApp(defense="cdp"), "trusted server"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(tmp_path: Path, new: NewApp, why: str) -> None:
    with pytest.raises(FedveilError, match=why):
        write_app(tmp_path / "app", new)
    assert not (tmp_path / "app").exists()


SAID = """
Traceback (most recent call last):
fedveil.errors.FedveilError: cannot read nosuch.csv: No such file or directory
\033[91mERROR \033[0m:     Exit Code: 700
2026-11-20T00:24:16.302Z INFO [uvicorn.error] Finished server process [21618]
"""


@pytest.mark.parametrize("status, code", [("finished:completed", 0), ("finished:failed", 2), ("finished:stopped", 2)])
def test_a_run_that_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    """`flwr run` ends with 0 whatever became of the run: this `flwr` does so, too."""
    flwr, asked = tmp_path / "flwr", tmp_path / "asked"
    told = json.dumps({"runs": [{"status": status}]})
    flwr.write_text(
        f"#!/bin/sh\nif [ $1 = run ]; then echo '{SAID}'; exit 0; fi\n"
        f'if [ ! -e {asked} ]; then touch {asked}; echo \'{{"runs": [{{"status": "running"}}]}}\'; exit; fi\n'
        f"echo '{told}'\n"
    )
    flwr.chmod(0o755)
    monkeypatch.setattr("fedveil.flower.federate.program", lambda name: str(flwr))
    monkeypatch.setattr("fedveil.flower.federate.simulating_superlink", lambda *_: nullcontext(1))
    write_app(tmp_path / "app", NewApp())
    assert run(["flower", "run", str(tmp_path / "app"), "--log", str(tmp_path / "log")]) == code
    said = capsys.readouterr()
    assert "Traceback" in said.out
    assert ("did not complete: fedveil.errors.FedveilError: cannot read nosuch.csv" in said.err) == bool(code)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FedveilError, match="not empty"):
        write_app(tmp_path, NewApp())
    with pytest.raises(FedveilError, match="starts with a letter"):
        write_app(tmp_path / "12", NewApp())
