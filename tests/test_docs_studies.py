"""docs/studies.md is true: its study is one, and every key is told."""

from __future__ import annotations

from pathlib import Path

from fedveil.study.definition import SCALES, Study
from pages import ROOT, assert_links_lead_to_files, blocks

PAGE = ROOT / "docs" / "studies.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_study_is_one(tmp_path: Path) -> None:
    (text,) = blocks(TEXT, "toml")
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    study = Study.read(tmp_path / "own.toml")
    assert len(study.at_scale("paper")[0].cells()) == 6
    assert len(study.at_scale("desk")[0].cells()) == 2


def test_every_key_and_scale_is_told() -> None:
    missing = [name for name in Study.model_fields if f"`{name}" not in TEXT and name not in ("settings", "source")]
    assert missing == []
    assert all(f"| `{scale}` |" in TEXT for scale in SCALES)


def test_the_links_lead_somewhere() -> None:
    assert_links_lead_to_files(TEXT, PAGE.parent)
