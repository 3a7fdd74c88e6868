"""The figures of a study: every kind, from audits that take seconds, and the numbers that stand on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedveil.errors import FedveilError
from fedveil.report.study_page import render_study
from fedveil.study.definition import Study
from fedveil.study.figures import Chart, Pictures, figures_of
from fedveil.study.outcome import Outcome
from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import StudyPlan, illustrated, plan_study, run_study
from fedveil.workers import Workers

TABLE = """
title = "Figures"
attack = ["inverting-gradients"]
seeds = [0]
[task]
data = "mnist"
[[rows]]
name = "none"
series = "none"
[[rows]]
name = "r = 1"
defense = "fedem:radius=1"
x = 1
series = "FedEM"
own = true
[[rows]]
name = "r = 4"
defense = "fedem:radius=4"
x = 4
series = "FedEM"
own = true
[[columns]]
head = "accuracy"
metric = "test"
better = "high"
[[columns]]
head = "PSNR 7"
metric = "psnr"
better = "low"
[published.""]
"r = 1" = ["0.5", "9.1"]
"r = 4" = ["0.4", "7.1"]
[[figures]]
title = "lines"
kind = "lines"
x = "r"
[[figures]]
title = "columns"
kind = "columns"
x = "column"
[[figures]]
title = "scatter"
kind = "scatter"
x = "PSNR 7"
y = ["accuracy"]
[[figures]]
title = "rounds"
kind = "rounds"
[[figures]]
title = "pictures"
kind = "pictures"
[[figures]]
title = "perturbations"
kind = "perturbations"
rows = ["r = 1", "r = 4"]
[[figures]]
title = "histogram"
kind = "histogram"
rows = ["r = 4"]
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyPlan, IndexedStore, Outcome]:
    folder = tmp_path_factory.mktemp("figures")
    (folder / "figures.toml").write_text(TABLE, encoding="utf-8")
    store = IndexedStore(folder / "store")
    plan = plan_study(folder / "figures.toml", "smoke", store)
    return plan, store, run_study(plan, store, Workers(1))


def test_every_kind_has_what_the_audits_found(ran: tuple[StudyPlan, IndexedStore, Outcome]) -> None:
    plan, store, whole = ran
    outcome, drawings = illustrated(plan, store)
    assert outcome == whole
    by_title = {drawing.title: drawing for drawing in drawings}
    assert set(by_title) == {
        *("lines, accuracy", "lines, PSNR 7", "columns", "scatter", "rounds", "pictures", "perturbations", "histogram"),
    }
    lines = by_title["lines, PSNR 7"]
    assert isinstance(lines, Chart)
    fedem, printed, level = lines.curves
    assert (fedem.x, [each.mean for each in printed.y]) == ([1.0, 4.0], [9.1, 7.1])
    assert printed.published
    assert level.label == "none"
    assert level.y[0] == level.y[1]
    ours = [value.ours for value in outcome.of("", "PSNR 7") if value.row != "none"]
    assert fedem.y == ours
    scatter = by_title["scatter"]
    assert isinstance(scatter, Chart)
    assert scatter.points
    assert [curve.label for curve in scatter.curves] == ["none", "FedEM"]
    assert scatter.curves[1].x_interval == ours
    rounds = by_title["rounds"]
    assert isinstance(rounds, Chart)
    assert [curve.x for curve in rounds.curves] == [[0.0, 1.0]] * 3
    assert rounds.curves[1].y[-1].mean == outcome.of("", "accuracy")[1].ours.mean  # type: ignore[union-attr]


def test_pictures_are_those_of_the_rows(ran: tuple[StudyPlan, IndexedStore, Outcome]) -> None:
    plan, store, _ = ran
    grids = {each.title: each for each in illustrated(plan, store)[1] if isinstance(each, Pictures)}
    assert [strip.label for strip in grids["pictures"].strips] == ["original", "none", "r = 1", "r = 4"]
    strips = {strip.label: strip.pictures for strip in grids["perturbations"].strips}
    assert list(strips)[1:3] == ["r = 1", "r = 1: what was added"]
    change = strips["r = 4"] - strips["original"]
    largest = np.abs(change).reshape(len(change), -1).max(1).reshape(-1, 1, 1, 1)
    assert np.allclose(strips["r = 4: what was added"], 0.5 + change / (2 * largest), atol=1e-6)
    weaker = np.abs(strips["r = 1"] - strips["original"]).sum()
    assert weaker < np.abs(change).sum()


def test_a_histogram_holds_all_entries_between_its_ends(ran: tuple[StudyPlan, IndexedStore, Outcome]) -> None:
    plan, store, _ = ran
    (chart,) = [each for each in illustrated(plan, store)[1] if each.title == "histogram"]
    assert isinstance(chart, Chart)
    assert [curve.label for curve in chart.curves] == ["without a defense", "r = 4"]
    for curve in chart.curves:
        assert 0.95 < sum(each.mean for each in curve.y) <= 1.0


def test_the_page_shows_them_and_loads_nothing(ran: tuple[StudyPlan, IndexedStore, Outcome]) -> None:
    plan, store, _ = ran
    page = render_study(*illustrated(plan, store))
    assert page.count('<svg class="chart"') == 6
    assert page.count("data:image/png;base64,") == 2 * (4 + 5)
    assert "http" not in page.replace("http-equiv", "")


def test_variance_is_that_of_the_mechanism(tmp_path: Path) -> None:
    """Duchi's mechanism sends ±c: its variance is c² - w²."""
    path = tmp_path / "variance.toml"
    head = TABLE.partition("[[rows]]")[0]
    rows = '[[rows]]\nname = "duchi"\ndefense = "duchi:epsilon=1"\n[[columns]]\nhead = "PSNR"\nmetric = "psnr"\n'
    path.write_text(head + rows + '[[figures]]\ntitle = "v"\nkind = "variance"\n', encoding="utf-8")
    scaled, _ = Study.read(path).at_scale("paper")
    nothing = Outcome(title="", paper="", scale="", cuts=[], notes=[], seeds=[0], heads=[], rows=[], own=[], values=[])
    (chart,) = figures_of(scaled, nothing, {}, IndexedStore(None))
    assert isinstance(chart, Chart)
    c = (np.e + 1) / (np.e - 1)
    for weight, found in zip(chart.curves[0].x, chart.curves[0].y, strict=True):
        assert found.mean == pytest.approx(c**2 - weight**2, rel=0.05)


@pytest.mark.parametrize("line", ['y = ["nowhere"]', 'rows = ["nobody"]', 'groups = ["elsewhere"]'])
def test_a_figure_that_names_what_is_not_there_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f'{TABLE}[[figures]]\ntitle = "f"\nkind = "rounds"\n{line}\n', encoding="utf-8")
    with pytest.raises(FedveilError, match=r"figure 'f': '(nowhere|nobody|elsewhere)' is no"):
        Study.read(path)
