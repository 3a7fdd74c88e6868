"""Options, the TOML file and the checked configuration are one thing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedveil.attacks.dlg import DLG
from fedveil.auditing.experiment import TaskSettings
from fedveil.auditing.settings import AuditSettings
from fedveil.cli.config import Config
from fedveil.cli.options import SETTINGS, Given
from fedveil.defenses.clip import Clip
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.toml import to_toml


def read(text: str, tmp_path: Path, command: str = "audit", **options: object) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    values = {name.replace("__", "."): value for name, value in options.items()}
    return Config.load(command, Given(values, path, False))


def test_every_field_is_an_option_and_every_option_a_field() -> None:
    fields = {f"federation.{field.name}" for field in dataclasses.fields(FederationSettings)}
    fields |= {f"audit.{field.name}" for field in dataclasses.fields(AuditSettings)}
    fields |= {f"task.{name}" for name in TaskSettings.model_fields}
    fields |= {field.alias or name for name, field in Config.model_fields.items()}
    sections = {"task", "federation", "audit"}
    assert {setting.key for setting in SETTINGS} == fields - sections - {"command", "trains", "own_auxiliary"}


def test_the_help_shows_the_defaults_that_hold() -> None:
    made = Config()
    holders = {"task": made.task, "federation": made.federation, "audit": made.audit}
    for setting in SETTINGS:
        section, dot, name = setting.key.partition(".")
        if not dot:
            continue
        default = getattr(holders[section], name)
        if default is None or default == ():
            assert setting.default in ("", "all", "never", "FEDVEIL_DATA or ~/.cache/fedveil"), setting
        elif isinstance(default, bool):
            assert default is (setting.default == name.replace("_", "-")), setting
        else:
            expected = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert setting.default == expected, setting
    assert made.suite == next(setting.default for setting in SETTINGS if setting.key == "suite")
    assert (made.seed, made.device, made.backend, made.defense) == (0, "cpu", "auto", ())


def test_typed_values_read_as_the_file_has_them() -> None:
    by_key = {setting.key: setting for setting in SETTINGS}
    assert by_key["federation.lr"].read("1/4") == 0.25
    assert by_key["audit.rounds"].read("1, 5") == [1, 5]
    assert by_key["federation.lr_steps"].read("51:0.001,81:1e-4") == [[51, 0.001], [81, 1e-4]]
    assert by_key["task.data"].read("8") == "8"


def test_options_win_over_the_file(tmp_path: Path) -> None:
    text = 'seed = 3\ndefense = ["clip:norm=1"]\n[federation]\nlr = 0.5\nrounds = 7'
    made = read(text, tmp_path, federation__lr=0.25, defense=["gradient-dropout"])
    assert (made.seed, made.federation.lr, made.federation.rounds) == (3, 0.25, 7)
    assert made.defense == (GradientDropout(),)


def test_attacks_that_are_typed_take_the_place_of_the_files_suite(tmp_path: Path) -> None:
    made = read('suite = "thorough"', tmp_path, attack=["dlg"])
    assert (made.suite, made.attack) == (None, (DLG(),))
    made = read('attack = ["dlg"]', tmp_path, suite="quick")
    assert (made.suite, made.attack) == ("quick", ())
    with pytest.raises(FedveilError, match="name a suite or attacks, not both"):
        read('attack = ["dlg"]\nsuite = "quick"', tmp_path)
    with pytest.raises(FedveilError, match="name a suite or attacks, not both"):
        read("", tmp_path, suite="quick", attack=["dlg"])


def test_a_defense_is_a_spec_a_chain_a_list_or_tables(tmp_path: Path) -> None:
    expected = (Clip(norm=2.0), GradientDropout(keep=0.5))
    for text in (
        'defense = "clip:norm=2+gradient-dropout:keep=0.5"',
        'defense = ["clip:norm=2", "gradient-dropout:keep=0.5"]',
        '[[defense]]\nname = "clip"\nnorm = 2\n[[defense]]\nname = "gradient-dropout"\nkeep = 0.5',
    ):
        assert read(text, tmp_path).defense == expected
    assert read('defense = "none"', tmp_path).defense == ()
    assert read('[[attack]]\nname = "dlg"\nsteps = 3', tmp_path).attack == (DLG(steps=3),)


def test_no_rounds_means_no_training_for_an_audit_alone(tmp_path: Path) -> None:
    made = read("[federation]\nrounds = 0", tmp_path)
    assert not made.trains
    assert made.kept()["federation"]["rounds"] == 0
    with pytest.raises(FedveilError, match=r"federation\.rounds must be greater than or equal to 1"):
        read("[federation]\nrounds = 0", tmp_path, "train")


@pytest.mark.parametrize("command", ["audit", "train"])
def test_what_is_written_down_reads_as_the_same(tmp_path: Path, command: str) -> None:
    text = """
        seed = 5
        defense = ["clip:norm=1", "gradient-dropout:keep=0.7,sigma=3e-3"]
        attack = ["inverting-gradients:steps=7,total_variation=1e-06", "dlg"]
        [task]
        model = "mlp:hidden=[8,4]"
        limit = 100
        [federation]
        lr_steps = [[2, 0.03125], [5, 1e-05]]
        patience = 3
        [audit]
        rounds = [1, 4]
    """
    made = read(text, tmp_path, command)
    written = to_toml(made.kept())
    again = read(written, tmp_path, command)
    assert again == made if command == "audit" else again.federation == made.federation
    assert to_toml(again.kept()) == written


def test_all_problems_are_told_at_once_in_one_line(tmp_path: Path) -> None:
    text = """
        sed = 3
        defense = "gradient-dropuot"
        attack = ["dlg:steps=0", "idlg:rate=1"]
        [task]
        modle = "mlp"
        data = "digts"
        [federation]
        rounds = true
        momentum = 1.5
        victims = 3
        [audit]
        source = "moon"
    """
    with pytest.raises(FedveilError) as caught:
        read(text, tmp_path, federation__lr=-1)
    said = str(caught.value)
    for part in (
        "unknown key 'sed': did you mean 'seed'?",
        "unknown key 'task.modle': did you mean 'task.model'?",
        "unknown key 'federation.victims': did you mean 'audit.victims'?",
        "unknown defense 'gradient-dropuot': did you mean 'gradient-dropout'?",
        "unknown data set 'digts': did you mean 'digits'?",
        "federation.rounds must not be true",
        "federation.momentum must be less than 1 (got 1.5)",
        "--lr must be greater than 0 (got -1)",
        "audit.source must be 'clients' or 'test' (got 'moon')",
        "DLG: steps must be greater than or equal to 1 (got 0)",
        "IDLG: no field 'rate' (fields: steps, lr, restarts)",
    ):
        assert part in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "text, words",
    [
        ("task = 3", "task must be"),
        ("federation = []", "federation must be a dictionary"),
        ("defense = 3", 'defense must be "name:field=value,..."'),
        ("[[defense]]\nkeep = 0.5", "a table with a name"),
        ("attack = []", "an audit needs an attack"),
        ('attack = ["dlg", "dlg:steps=3"]', "each attack can be named once"),
        ('[federation]\nlr = "fast"', "federation.lr must be a valid number"),
        ("[federation]\nlr_steps = [3]", "federation.lr_steps.0 must be a valid tuple"),
        ('device = "abacus"', "device 'abacus' cannot be used here"),
        ('device = "meta"', "device 'meta' cannot be used here"),
        ('backend = "stackd"', "did you mean 'stacked'?"),
        ("seed = -1", "seed must be greater than or equal to 0"),
        ('[federation]\nupload = "delta"', "needs the protocol fedavg"),
        (f"seed = {'9' * 5000}", "not valid TOML"),
        (f"seed = 0x{'f' * 5000}", "a number has more than 64 bits"),
        (f"[task]\nclients = [[{2**63}]]", "a number has more than 64 bits"),
        (f"seed = {'[' * 5000}", "not valid TOML"),
        (f"{'a.' * 3000}b = 1", "nested too deeply"),
        ("audit.whole = 1", "unknown key 'audit.whole': there are: audit.victims"),
    ],
)
def test_wrong_types_and_values_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FedveilError) as caught:
        read(text, tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
