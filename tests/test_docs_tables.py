"""docs/tables.md is true: its fields exist, its Python runs, and its audit is one."""

from __future__ import annotations

import re

import pytest

from fedveil.fields import field_names
from fedveil.leakage.catalog import METRICS
from fedveil.registry import datasets
from pages import ROOT, blocks, checked_audit

TEXT = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")


def names(heading: str) -> set[str]:
    table = TEXT[TEXT.index(heading) :].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_the_fields_and_metrics_are_there() -> None:
    assert names("| field |") == set(field_names(datasets.load("csv")))
    assert names("| metric |") <= set(METRICS)


def test_the_python_runs() -> None:
    (code,) = blocks(TEXT, "python")
    exec(code, {})


def test_the_audits_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in blocks(TEXT, "bash"):
        assert checked_audit(command, monkeypatch)
