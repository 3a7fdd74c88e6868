"""The study files: each is read, its numbers are the paper's, and it can be run."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from fedveil.study.definition import SCALES, Study
from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import list_studies, plan_study
from pages import ROOT

STUDIES = dict(list_studies(ROOT))
PAPERS = Path(os.environ.get("FEDVEIL_PAPERS", ROOT.parent / "shared" / "papers"))
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?!\w)")


def test_there_are_studies_of_every_paper() -> None:
    assert {name.partition("/")[0] for name in STUDIES} >= {
        *("fedem", "gradient-dropout", "spm-fl", "fedbarre", "fedcrap"),
    }


@pytest.mark.parametrize("name", STUDIES)
def test_every_number_is_printed_in_the_paper_as_often_as_in_the_table(name: str) -> None:
    study = Study.read(STUDIES[name])
    path = PAPERS / study.source
    if not study.source or not path.is_file():
        pytest.skip("the paper's text is not at hand")
    printed = Counter(NUMBER.findall(re.sub(r"</?b>|\*\*", "", path.read_text(encoding="utf-8"))))
    copied = Counter(number for rows in study.published.values() for row in rows.values() for number in row)
    assert {number: count for number, count in copied.items() if printed[number] < count} == {}


@pytest.mark.parametrize("name", STUDIES)
def test_every_audit_of_every_scale_is_well_formed(name: str) -> None:
    study = Study.read(STUDIES[name])
    for scale in SCALES:
        scaled, cuts = study.at_scale(scale)
        assert scaled.cells()
        assert bool(cuts) == (scale != "paper")


@pytest.mark.parametrize("name", STUDIES)
def test_the_smallest_scale_can_be_run_without_any_data_set(name: str, tmp_path: Path) -> None:
    plan = plan_study(STUDIES[name], "smoke", IndexedStore(tmp_path))
    # The leaderboard tries every defense everywhere: what a protocol cannot use stays empty, and says so.
    assert [why for why in plan.missing.values() if " protects " not in why] == []
    assert not plan.missing or name == "leaderboard"
    assert plan.estimates.stages
