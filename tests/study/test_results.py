"""RESULTS.md takes its tables from a store and keeps its words."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import list_studies
from pages import ROOT

TEXT = """# Results

<!-- a/one -->
old table
<!-- end -->

A reading of one.

<!-- a/two -->
<!-- end -->

The last words."""


@pytest.fixture
def results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_results", ROOT / "studies" / "update_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_renewed_and_words_stay(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "table", lambda name, store: f"table of {name}\n")
    store = IndexedStore(tmp_path)
    both = results.renewed(TEXT, store)
    assert "old table" not in both
    assert "<!-- a/one -->\n\ntable of a/one\n\n<!-- end -->\n\nA reading of one." in both
    assert "<!-- a/two -->\n\ntable of a/two\n\n<!-- end -->\n\nThe last words." in both
    assert results.renewed(both, store) == both
    one = results.renewed(TEXT, store, ["a/two"])
    assert "old table" in one
    assert "table of a/two" in one


def test_a_study_that_was_not_run_keeps_its_table(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "table", lambda name, store: None)
    assert results.renewed(TEXT, IndexedStore(tmp_path)) == TEXT


def test_every_table_is_that_of_a_study() -> None:
    text = (ROOT / "studies" / "RESULTS.md").read_text(encoding="utf-8")
    marks = re.findall(r"<!-- ([\w/-]+) -->", text)
    assert marks[1::2] == ["end"] * (len(marks) // 2)
    assert set(marks[::2]) <= set(dict(list_studies(ROOT)))
