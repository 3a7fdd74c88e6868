"""Flower's own engine, once: `fedveil federate --simulate`, from the command line to an attack on what it sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedveil as fv
from fedveil.tensors import read_safetensors
from journeys.console import Said

DEFENSE = "gradient-dropout:keep=0.9+spm:epsilon=6"


def command(folder: Path, *arguments: str) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", *arguments], cwd=folder, capture_output=True, text=True, timeout=400
    )
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    folder = tmp_path_factory.mktemp("simulation")
    said = command(
        folder,
        *("federate", "--simulate", "--data", "digits", "--model", "mlp:hidden=[12]", "--limit", "150"),
        *("--clients", "3", "--rounds", "2", "--batch-size", "64", "--local-epochs", "2", "--defense", DEFENSE),
        *("--record-rounds", "1", "--record-clients", "1", "--seed", "5", "--out", "out"),
    )
    return folder, said


def test_it_trains_as_the_embedded_engine_does(simulated: tuple[Path, Said]) -> None:
    folder, said = simulated
    assert (said.code, said.err) == (0, ""), said
    assert "Round 2: 3 of 3 clients" in said.out
    task = fv.task("digits", model="mlp:hidden=[12]", clients=3, limit=150, seed=5)
    settings = fv.FederationSettings(protocol="fedavg", rounds=2, batch_size=64, local_epochs=2)
    expected = fv.federate(task, DEFENSE, settings, seed=5, backend="loop").params
    _, found = read_safetensors(folder / "out/model.safetensors")
    assert all(torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5) for name, tensor in expected.items())


def test_what_it_sent_can_be_attacked(simulated: tuple[Path, Said]) -> None:
    folder, _ = simulated
    arguments = ["attack", "out/captures", "--data", "digits", "--truths", "out/truths", "--json", "--no-link"]
    quick = "inverting-gradients:steps=5,restarts=1"
    said = command(folder, *arguments, "--attack", quick, "--out", "attacked", "--store", "none")
    assert said.code == 0, said.err
    assert json.loads(said.out)


def test_nothing_is_left_running(simulated: tuple[Path, Said]) -> None:
    log = (simulated[0] / "out/flower.log").read_text()
    started = int(log.split("Started server process [")[1].split("]")[0])
    with pytest.raises(ProcessLookupError):
        os.kill(started, 0)
