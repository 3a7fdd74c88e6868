"""The front door: one list of public names, for type checkers, completion and importing."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedveil as fv
from fedveil.registry import REGISTRIES

STUB = ast.parse(Path(fv.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))


def test_completion_shows_every_public_name_and_nothing_else() -> None:
    assert dir(fv) == sorted(fv.__all__)
    assert {"audit", "federate", "task", "defenses", "attacks", "FedveilError"} <= set(dir(fv))
    assert len(dir(fv)) <= 21, "methods belong in their namespaces, rarely used names in their modules"
    assert not [name for name in dir(fv) if name.startswith("_") and name != "__version__"]


def test_every_name_of_the_stub_is_there() -> None:
    for node in STUB.body[1:]:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "type checkers take only names that are imported as themselves"
            assert getattr(fv, alias.name) is getattr(importlib.import_module(str(node.module)), alias.name)


@pytest.mark.parametrize("kind", ["defenses", "attacks"])
def test_methods_are_attributes_of_their_namespace(kind: str) -> None:
    namespace, registry = getattr(fv, kind), REGISTRIES[kind]
    own = [name for name, entry in registry.entries().items() if entry.target.startswith(f"fedveil.{kind}.")]
    classes = [registry.load(name) for name in own]
    assert dir(namespace) == sorted(cls.__name__ for cls in classes)
    for cls in classes:
        assert getattr(namespace, cls.__name__) is cls
    stub = Path(namespace.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert stub == registry.stub(), "a method came, went or moved: run `make stubs`"


def test_a_name_that_is_elsewhere_says_where() -> None:
    for name, home in {
        "GradientDropout": "defenses.GradientDropout",
        "DLG": "attacks.DLG",
        "Audit": "AuditSettings",
        "Federation": "FederationSettings",
    }.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': it is fedveil\.{home}$"):
            getattr(fv, name)
    with pytest.raises(AttributeError, match=r"^module 'fedveil' has no attribute 'nothing'$"):
        fv.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"fedveil\.defenses' has no attribute 'Clipp': did you mean 'Clip'\?$"):
        fv.defenses.Clipp  # noqa: B018
    assert not hasattr(fv.attacks, "__wrapped__")


def test_names_are_known_before_torch_is_imported() -> None:
    code = (
        "import sys, fedveil; assert 'audit' in dir(fedveil); assert 'Clip' in dir(fedveil.defenses)\n"
        "assert 'DLG' in dir(fedveil.attacks); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_a_notebook_shows_of_things_is_one_line() -> None:
    task = fv.task("digits", model="mlp:hidden=[4]", clients=2, limit=20)
    settings = fv.FederationSettings(rounds=2, record_rounds=(1,), record_clients=1)
    run = fv.federate(task, None, settings, backend="stacked")
    assert re.fullmatch(r"Run\(round 2 of 2, test accuracy \d+\.\d %, stacked, 1 captured updates?\)", repr(run))
    assert repr(task) == "Task(digits, model=mlp, clients=2, train=20)"
    guard = fv.Guard(task.model, task.loss, "clip:norm=2")
    assert repr(guard) == "Guard(Sequential, clip:norm=2)"
    assert repr(fv.Guard(task.model, task.loss, None)) == "Guard(Sequential, no defense)"
