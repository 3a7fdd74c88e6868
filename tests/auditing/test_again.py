"""A result's configuration reads back as the file and as the command that it came from."""

from __future__ import annotations

import shlex
import tomllib
from typing import Any

import pytest
from typer.testing import CliRunner

import fedveil as fv
from fedveil.auditing.again import command_line, config_file, config_toml
from fedveil.auditing.suites import DEFAULT, SUITES
from fedveil.cli.config import Config
from fedveil.cli.options import SETTINGS, with_settings

TASK = fv.task("digits", model="mlp:hidden=[8]", clients=3, seed=3, limit=200)
FEDERATION = fv.FederationSettings(rounds=4, lr_steps=((2, 0.03125), (3, 1e-05)), patience=3)


def config(task: fv.Task = TASK, seed: int = 3, train: bool = True) -> dict[str, Any]:
    """As a result has it."""
    made = fv.Experiment(
        task=task,
        defense="clip:norm=2+gradient-dropout:keep=0.7",
        attack=(fv.attacks.InvertingGradients(steps=7), fv.attacks.DLG()),
        federation=FEDERATION,
        audit=fv.AuditSettings(victims=5, rounds=(1, 3), batch_size=2, exposed_above=0.3, link=False),
        seed=seed,
        trains=train,
    )
    return made.described() | {"task": task.description}


def typed(line: str) -> Config:
    """What the command line makes of a line."""
    import typer

    taken: list[Config] = []
    app = typer.Typer()
    app.command()(with_settings("audit")(lambda given: taken.append(Config.load("audit", given))))
    done = CliRunner().invoke(app, shlex.split(line)[2:])
    assert done.exit_code == 0, done.output
    return taken[0]


@pytest.mark.parametrize("train", [True, False])
def test_the_file_and_the_command_say_the_same(train: bool) -> None:
    written = config(train=train)
    from_file = Config.checked(tomllib.loads(config_toml(written)))
    assert from_file.kept() == typed(command_line(written)).kept()
    assert from_file.trains is train
    assert from_file.audit == fv.AuditSettings(victims=5, rounds=(1, 3), batch_size=2, exposed_above=0.3, link=False)
    if train:
        assert from_file.federation == FEDERATION
    assert str(from_file.chain) == "clip:norm=2+gradient-dropout:keep=0.7"


def test_changes_are_in_the_command() -> None:
    changed = {"audit.victims": 64, "audit.batch_size": 1, "attack": [{"name": "dlg", "steps": 9}]}
    made = typed(command_line(config(), changed))
    assert (made.audit.victims, made.audit.batch_size) == (64, 1)
    assert made.attack == (fv.attacks.DLG(steps=9),)


def suite_of(name: str) -> dict[str, Any]:
    made = fv.Experiment(task=TASK, suite=name, audit=fv.AuditSettings(auxiliary="mnist", auxiliary_most=9), seed=3)
    return made.described() | {"task": TASK.description}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_repeated_by_its_name(name: str) -> None:
    written = suite_of(name)
    from_file, from_line = Config.checked(tomllib.loads(config_toml(written))), typed(command_line(written))
    assert from_file.kept() == from_line.kept()
    assert (from_line.suite, from_line.attack) == (name, ())
    assert (from_line.audit.auxiliary, from_line.audit.auxiliary_most) == ("mnist", 9)
    assert ("--suite" in command_line(written)) == (name != DEFAULT)
    settled = typed(command_line(written, {"audit.stop_when_settled": False}))
    assert not settled.audit.stop_when_settled


def test_a_suite_and_attacks_take_each_others_place() -> None:
    assert typed(command_line(suite_of("quick"), {"attack": [{"name": "dlg"}]})).attack == (fv.attacks.DLG(),)
    assert typed(command_line(config(), {"suite": "thorough"})).suite == "thorough"


def test_every_setting_is_spelled_as_the_command_line_has_it() -> None:
    flags = {setting.key: setting.flag for setting in SETTINGS}
    other: dict[str, Any] = {"victims": 3, "batch_size": 2, "source": "test", "rounds": [1, 2], "attackers": "naive"}
    line = command_line(config(), {f"audit.{name}": value for name, value in other.items()})
    for name in other:
        assert flags[f"audit.{name}"] in shlex.split(line)


def test_what_no_file_can_say_is_said_in_python() -> None:
    import torch

    own = fv.Task(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        data=(torch.rand(60, 1, 8, 8), torch.arange(60) % 10),
        clients=2,
    )
    assert config_file(config(own)) is None
    line = command_line(config(own), {"audit.victims": 64, "attack": [{"name": "dlg", "steps": 9}]})
    assert line == "fedveil.audit(task, defense, 'dlg:steps=9', settings=fedveil.AuditSettings(victims=64), ...)"
    assert "suite='thorough'" in command_line(config(own), {"suite": "thorough"})
    assert command_line(config(seed=4)).startswith("fedveil.audit(")  # the task has another seed than the run
    assert tomllib.loads(config_toml(config(own)))["task"]["clients"] == 2
