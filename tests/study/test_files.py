"""The study files: each is read, its numbers are the paper's, and it can be run."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedveil.study.definition import SCALES, Study
from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import check_metrics, list_studies, plan_study, run_study
from fedveil.workers import Workers
from pages import ROOT

STUDIES = dict(list_studies(ROOT))
PAPERS = Path(os.environ.get("FEDVEIL_PAPERS", ROOT.parent / "shared" / "papers"))
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?!\w)")


WANTED = {
    "fedem": [*(f"table{n}" for n in (1, *range(4, 7), *range(11, 29))), "figure6", "figure7", "figure8"],
    "gradient-dropout": [*(f"figure{n}" for n in (2, 3, 4, 5, 6, 8, 9)), "figure7-imagenet", "figure7-nih"],
    "spm-fl": [*(f"table{n}" for n in range(2, 19)), *(f"figure{n}" for n in (2, 11, 12, 13, 14))],
    "fedbarre": [*(f"table{n}" for n in range(1, 17)), "figure3", "figure4"],
    "fedcrap": ["table1", "table2", "table3", "figure3", "figure5"],
}


def test_there_is_a_study_of_every_table_and_figure() -> None:
    assert {f"{paper}/{table}" for paper, tables in WANTED.items() for table in tables} <= set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_every_published_row_is_printed_so_in_the_paper(name: str) -> None:
    """Its numbers stand beside each other in the text, in this order; or those of a column, if it is turned."""
    study = Study.read(STUDIES[name])
    path = PAPERS / study.source
    if not study.source or not path.is_file():
        pytest.skip("the paper's text is not at hand")
    marks = re.sub(r"</?b>|\*\*", "", path.read_text(encoding="utf-8"))
    text = re.sub(r"\tE[13]\t", "\t", marks)  # the stage stands between utility and privacy
    for rows in study.published.values():
        columns = list(zip(*rows.values(), strict=True))
        apart = [name for name, cells in rows.items() if not _beside_each_other(cells, text)]
        assert not apart or all(_beside_each_other(cells, text) for cells in columns), apart


@pytest.mark.parametrize("name", STUDIES)
def test_no_number_is_copied_more_often_than_it_is_printed(name: str) -> None:
    study = Study.read(STUDIES[name])
    path = PAPERS / study.source
    if not study.source or not path.is_file():
        pytest.skip("the paper's text is not at hand")
    printed = Counter(NUMBER.findall(re.sub(r"</?b>|\*\*", "", path.read_text(encoding="utf-8"))))
    copied = Counter(n for rows in study.published.values() for cells in rows.values() for c in cells for n in _in(c))
    assert {number: count for number, count in copied.items() if printed[number] < count} == {}


def _in(cell: str) -> list[str]:
    return NUMBER.findall(cell)


def _beside_each_other(cells: Sequence[str], text: str) -> bool:
    numbers = [number for cell in cells for number in _in(cell)]
    row = r"[^\d.]{1,12}".join(map(re.escape, numbers))
    return re.search(rf"(?<![\d.]){row}(?!\d)", text) is not None


@pytest.mark.parametrize("name", STUDIES)
def test_every_audit_of_every_scale_is_well_formed(name: str) -> None:
    study = Study.read(STUDIES[name])
    for scale in SCALES:
        scaled, cuts = study.at_scale(scale)
        assert scaled.cells()
        assert bool(cuts) == (scale != "paper")


@pytest.mark.parametrize("scale", [pytest.param("smoke"), pytest.param("desk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STUDIES)
def test_it_can_be_planned(name: str, scale: str, tmp_path: Path) -> None:
    if scale == "desk" and "FEDVEIL_DATA" not in os.environ:
        pytest.skip("the data sets are not at hand")
    plan = plan_study(STUDIES[name], scale, IndexedStore(tmp_path))
    # The leaderboard tries every defense everywhere: what a protocol cannot use stays empty, and says so.
    expected = (" protects ", "fedveil data fetch") if scale == "desk" else (" protects ",)
    assert [why for why in plan.missing.values() if not any(word in why for word in expected)] == []
    assert scale == "desk" or not plan.missing or name == "leaderboard"
    assert plan.estimates.stages


SHORT = ("fedem/figure8", "gradient-dropout/figure9", "spm-fl/table12", "fedbarre/table1", "fedcrap/figure4")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in STUDIES]
)
def test_the_smallest_scale_runs_without_any_data_set(name: str, tmp_path: Path) -> None:
    store = IndexedStore(tmp_path)
    plan = plan_study(STUDIES[name], "smoke", store)
    outcome = run_study(plan, store, Workers(1))
    # What smoke scale leaves out, and nothing else, is missing.
    left = {value.metric for value in outcome.values if value.ours is None and " protects " not in value.missing}
    assert left <= {"lpips", "kl", "feature_mse"}
    assert any(value.ours is not None for value in outcome.values)


@pytest.mark.parametrize("name", STUDIES)
def test_every_column_is_measured(name: str) -> None:
    for scale in SCALES:
        check_metrics(Study.read(STUDIES[name]).at_scale(scale)[0])
