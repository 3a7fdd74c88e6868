"""docs/text.md is true: its fields, models and metrics exist, and its audits can be run."""

from __future__ import annotations

import re

import pytest

from fedveil.fields import field_names
from fedveil.leakage.catalog import METRICS
from fedveil.registry import attacks, datasets, models
from pages import ROOT, blocks, checked_audit

TEXT = (ROOT / "docs" / "text.md").read_text(encoding="utf-8")


def names(heading: str) -> set[str]:
    table = TEXT[TEXT.index(heading) :].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", line.split("|")[1])}


def test_the_fields_models_metrics_and_attacks_are_there() -> None:
    assert names("| field |") == set(field_names(datasets.load("sentences")))
    assert names("| metric |") <= set(METRICS)
    assert names("| model |") <= set(models.entries())
    for name in attacks.entries():
        if attacks.load(name).modalities == ("sentences",):  # type: ignore[attr-defined]
            assert f"`{name}`" in TEXT


def test_the_audits_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in blocks(TEXT, "bash"):
        assert checked_audit(command, monkeypatch)


def test_the_python_block_comes_to_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = blocks(TEXT, "python")
    exec(compile(block, "text.md", "exec"), {"__name__": "text"})
    said = blocks(TEXT, "text")
    assert capsys.readouterr().out.strip() == said[-1].strip()
