"""`fedveil flower new`: the app that it writes runs over a grid of functions. Flower itself: test_simulation.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.config_utils import load_and_validate

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


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FedveilError, match="not empty"):
        write_app(tmp_path, NewApp())
    with pytest.raises(FedveilError, match="starts with a letter"):
        write_app(tmp_path / "12", NewApp())
