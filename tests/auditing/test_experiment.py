"""One declared experiment for Python, TOML files and the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedveil as fv
from fedveil.auditing.suites import SUITES
from fedveil.cli.config import Config
from fedveil.cli.options import Given
from fedveil.errors import FedveilError
from fedveil.toml import to_toml

FILE = """
seed = 3
defense = ["clip:norm=1", "gradient-dropout:keep=0.7"]
attack = ["inverting-gradients:steps=7"]
[task]
data = "digits"
model = "mlp:hidden=[8]"
clients = 3
[federation]
rounds = 4
lr = 0.05
[audit]
victims = 5
link = false
"""


def test_a_file_python_and_the_command_line_make_the_same(tmp_path: Path) -> None:
    path = tmp_path / "audit.toml"
    path.write_text(f'command = "audit"\nout = "run"\nquiet = true\n{FILE}', encoding="utf-8")
    read = fv.Experiment.read(path)
    written = fv.Experiment(
        seed=3,
        task={"data": "digits", "model": "mlp:hidden=[8]", "clients": 3},
        defense=[fv.defenses.Clip(norm=1), "gradient-dropout:keep=0.7"],
        attack=fv.attacks.InvertingGradients(steps=7),
        federation=fv.FederationSettings(rounds=4, lr=0.05),
        audit=fv.AuditSettings(victims=5, link=False),
    )
    assert read == written
    typed = Config.load("audit", Given({}, path, False))
    assert typed.described() == read.described()
    again = fv.Experiment.checked(tomllib.loads(to_toml(read.described())))
    assert again == read


def test_it_is_audited_as_its_parts_are(tmp_path: Path) -> None:
    path = tmp_path / "audit.toml"
    path.write_text(FILE.replace("rounds = 4", "rounds = 0").replace("victims = 5", "victims = 2"), encoding="utf-8")
    experiment = fv.Experiment.read(path)
    assert not experiment.trains
    assert experiment.described()["federation"]["rounds"] == 0
    whole = fv.audit(experiment)
    parts = fv.audit(
        fv.task("digits", model="mlp:hidden=[8]", clients=3, seed=3),
        "clip:norm=1+gradient-dropout:keep=0.7",
        "inverting-gradients:steps=7",
        federation=fv.FederationSettings(lr=0.05),
        settings=fv.AuditSettings(victims=2, link=False),
        seed=3,
        train=False,
    )
    assert [row.values for row in whole.result.rows] == [row.values for row in parts.result.rows]
    assert whole.result.provenance.config == parts.result.provenance.config


def test_the_link_test_is_part_of_every_audit_unless_it_is_switched_off() -> None:
    link = fv.attacks.LinkTest()
    dlg = fv.attacks.DLG()
    assert fv.Experiment(attack=dlg).attacks == (dlg, link)
    assert fv.Experiment(attack=[link]).attacks == (link,)
    assert fv.Experiment(attack=dlg, audit={"link": False}).attacks == (dlg,)
    assert link in fv.Experiment().attacks
    assert link not in fv.Experiment(audit={"link": False}).attacks


def test_where_no_attack_is_named_a_suite_is_run() -> None:
    plain = fv.Experiment()
    assert (plain.suite, plain.attack, plain.described()["suite"]) == ("standard", (), "standard")
    assert "attack" not in plain.described()
    assert fv.attacks.InvertingGradients(steps=400) in plain.attacks
    assert fv.Experiment(suite="quick").suite == "quick"
    named = fv.Experiment(attack="dlg")
    assert (named.suite, named.stops) == (None, False)
    assert "suite" not in named.described()
    assert [fv.Experiment(suite=name).stops for name in SUITES] == [True, True, False]
    assert not fv.Experiment(audit={"stop_when_settled": False}).stops


@pytest.mark.parametrize(
    "given, said",
    [
        ({"task": {"data": "digit"}}, "did you mean 'digits'"),
        ({"task": {"client": 3}}, "unknown key 'task.client': did you mean 'task.clients'?"),
        ({"victims": 3}, "unknown key 'victims': did you mean 'audit.victims'?"),
        ({"audit": {"victims": True}}, "audit.victims must not be true"),
        ({"seed": -1}, "seed must be greater than or equal to 0"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"defense": ["clip:norm=-1"]}, "norm must be greater than 0"),
        ({"attack": []}, "needs an attack"),
        ({"attack": ["dlg"], "suite": "quick"}, "name a suite or attacks, not both"),
        ({"suite": "quik"}, "unknown suite 'quik': did you mean 'quick'"),
        ({"audit": {"auxiliary": "mnits"}}, "auxiliary is neither held-out nor none: .*did you mean 'mnist'"),
        ({"audit": {"auxiliary_most": 0}}, "auxiliary_most must be greater"),
        ({"attack": ["dlg", "dlg"]}, "named once"),
    ],
)
def test_whatever_is_wrong_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(FedveilError, match=said) as raised:
        fv.Experiment.checked(given)
    assert "\n" not in str(raised.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(FedveilError) as raised:
        fv.Experiment.checked({"seed": -1, "defens": "clip", "audit": {"candidates": 0}})
    assert all(word in str(raised.value) for word in ("seed", "did you mean 'defense'?", "candidates"))
