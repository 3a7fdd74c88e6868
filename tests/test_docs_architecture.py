"""docs/architecture.md and CONTRIBUTING.md are true: files and functions that they name are there, examples work."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import fedveil as fv
from fedveil.registry import attacks, defenses
from pages import ROOT, assert_links_lead_to_files, blocks

PACKAGE = ROOT / "src" / "fedveil"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_files_and_links_are_there() -> None:
    assert_links_lead_to_files(ARCHITECTURE, ROOT / "docs")
    assert_links_lead_to_files(CONTRIBUTING, ROOT)
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", ARCHITECTURE))
    assert len(named) > 20
    assert [name for name in sorted(named) if not ((PACKAGE / name).is_file() or (ROOT / name).is_file())] == []
    rooms = set(re.findall(r"`([a-z_]+)/`", ARCHITECTURE))
    assert [name for name in sorted(rooms) if not (PACKAGE / name).is_dir()] == []


def test_the_functions_of_the_stages_are_there() -> None:
    stages = re.findall(r"^\| (?:train|observe|fit|attack|score|judge) \| (.*?) \|", ARCHITECTURE, re.MULTILINE)
    assert len(stages) == 6
    named = [name for stage in stages for name in re.findall(r"`([a-z_]+)\.([a-z_]+)`", stage)]
    assert len(named) == 7
    for module, function in named:
        assert callable(getattr(importlib.import_module(f"fedveil.auditing.{module}"), function))


def example(mark: str) -> types.ModuleType:
    """The module that a page shows."""
    (code,) = (each for each in blocks(CONTRIBUTING, "python") if mark in each)
    module = types.ModuleType(f"contributed_{mark}")
    sys.modules[module.__name__] = module
    exec(compile(code, "CONTRIBUTING.md", "exec"), module.__dict__)
    return module


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is forgotten afterwards."""
    for registry in (defenses, attacks):
        monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))


@pytest.mark.usefixtures("registered")
def test_the_attack_of_a_third_party_works_in_an_audit(tmp_path: Path) -> None:
    nearest = example("class Nearest").Nearest(most=100)
    task = fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=2)
    settings = fv.AuditSettings(victims=4, reference="none", candidates=20)
    found = fv.audit(task, "clip", nearest, settings=settings, train=False, backend="stacked", store=tmp_path)
    assert found.leakage["ceiling", "psnr", "nearest"].mean > found.leakage["noise-floor", "psnr", "nearest"].mean


@pytest.mark.usefixtures("registered")
def test_the_defense_of_a_third_party_works() -> None:
    sign = example("class Sign").Sign(scale=0.5)
    guard = fv.Guard(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, sign, seed=0)
    guard.backward(torch.randn(3, 4), torch.tensor([0, 1, 1]))
    assert all(bool((p.grad.abs() == 0.5).all()) for p in guard.model.parameters() if p.grad is not None)
