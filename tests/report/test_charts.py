"""Charts draw whatever an attack may return, with round ticks and labels that keep apart."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.auditing.result import Estimate
from fedveil.report.charts import MOST_POINTS, Axis, Series, interval_bar, line_chart, spread
from fedveil.report.scales import drawable, linear_scale, log_scale

anything = st.floats(allow_nan=True, allow_infinity=True)


def draw(*series: Series, log: bool = False, percent: bool = False, width: float = 720) -> ElementTree.Element:
    """A chart, read back as XML: what is not well-formed raises."""
    y = Axis("Cost (↑ more private)", log=log, percent=percent)
    return ElementTree.fromstring(line_chart(series, x=Axis("Step"), y=y, title="A <chart>", width=width))


def texts(chart: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in chart.iter("text")]


def paths(chart: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [path for path in chart.iter("path") if (path.get("class") or "").split()[0] == kind]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.tuples(anything, anything, anything, anything), max_size=8), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_any_values_are_drawn_within_the_canvas(lines: list[list[tuple[float, ...]]], log: bool, percent: bool) -> None:
    series = [Series(f"line {i}", *map(list, zip(*line, strict=True))) for i, line in enumerate(lines) if line]  # type: ignore[arg-type]
    chart = draw(*series, log=log, percent=percent)
    _, _, width, height = map(float, chart.get("viewBox", "").split())
    for path in chart.iter("path"):
        assert "nan" not in path.get("d", "")
        assert "inf" not in path.get("d", "")
        for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d", "")):
            assert -20 <= float(x) <= width + 1  # a whisker may stand a little to the left of its point
            assert -1 <= float(y) <= height + 1


@pytest.mark.parametrize("series", [[], [Series("empty", [], [])], [Series("lost", [0, 1], [math.nan, math.inf])]])
def test_an_empty_chart_says_so(series: list[Series]) -> None:
    assert "Nothing to draw" in texts(draw(*series))[0]


def test_one_point_is_a_dot_with_a_whisker() -> None:
    chart = draw(Series("one", [3], [0.5], [0.4], [0.6]))
    assert [dot.get("class") for dot in chart.iter("circle")] == ["dot ceiling"]
    assert len(paths(chart, "whisker")) == 1
    assert not paths(chart, "line")


def test_a_gap_splits_the_line_and_the_band() -> None:
    y = [1.0, 2.0, math.nan, 2.0, 1.0]
    chart = draw(Series("gap", range(5), y, y, y))
    assert len(paths(chart, "line")) == 2
    assert len(paths(chart, "band")) == 2


def test_a_chart_is_accessible_and_escaped() -> None:
    chart = draw(Series("<b>&", [0, 1], [0.25, 0.5]), percent=True)
    assert chart.get("role") == "img"
    assert chart.findtext("title") == "A <chart>"
    assert chart.findtext("desc") == "<b>&: 25.0 % at 0, 50.0 % at 1"


def test_a_log_axis_is_used_where_it_helps_and_says_so() -> None:
    falling = draw(Series("falling", [0, 1, 2], [1.0, 0.1, 0.001]), log=True)
    assert "(log scale)" in texts(falling)[0]
    flat = draw(Series("flat", [0, 1, 2], [1.0, 0.9, 0.8]), log=True)
    assert "(log scale)" not in texts(flat)[0]
    touching_zero = draw(Series("zero", [0, 1, 2], [1.0, 0.1, 0.0]), log=True)
    assert "(log scale)" not in texts(touching_zero)[0]


def test_long_series_are_thinned_but_keep_their_end() -> None:
    chart = draw(Series("long", range(10_001), [float(i % 7) for i in range(10_000)] + [42.0]))
    line = paths(chart, "line")[0].get("d", "")
    assert line.count("L") <= MOST_POINTS + 1
    assert "42" in (chart.findtext("desc") or "")


@pytest.mark.parametrize("count", [2, 6, 20])
def test_labels_of_equal_lines_do_not_overlap(count: int) -> None:
    chart = draw(*(Series(f"line number {i} with a long name", [0, 1], [1.0, 1.0]) for i in range(count)))
    heights = sorted(float(text.get("y", "")) for text in chart.iter("text") if text.get("class") == "label")
    assert len(heights) >= count
    assert min(b - a for a, b in pairwise(heights)) >= 15


@given(st.lists(st.floats(0, 300), min_size=1, max_size=10))
def test_spread_keeps_apart_and_inside(targets: list[float]) -> None:
    centers = spread(targets, [20.0] * len(targets), 0.0, 300.0)
    ordered = sorted(centers)
    assert ordered[0] >= 10 - 1e-6
    assert ordered[-1] <= 290 + 1e-6
    assert all(b - a >= 20 - 1e-6 for a, b in pairwise(ordered))


@settings(max_examples=300)
@given(st.lists(anything, max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_linear_ticks_are_few_ordered_and_inside(values: list[float], whole: bool, percent: bool, tight: bool) -> None:
    scale = linear_scale(values, whole=whole, percent=percent, tight=tight)
    assert scale.low < scale.high
    assert len(scale.ticks) == len(scale.labels) <= 12
    assert list(scale.ticks) == sorted(scale.ticks)
    assert all(0 <= scale.place(value) <= 1 for value in values if drawable(value))


@given(st.lists(anything, max_size=6))
def test_log_ticks_are_few_and_inside(values: list[float]) -> None:
    scale = log_scale(values)
    if scale is not None:
        assert 1 <= len(scale.ticks) <= 8
        assert all(0 <= scale.place(value) <= 1 for value in values if drawable(value))


@pytest.mark.parametrize(
    "estimate",
    [None, Estimate(mean=math.nan, low=math.nan, high=math.nan, count=0), Estimate(mean=2, low=-1, high=9, count=9)],
)
def test_an_interval_bar_stays_within_its_track(estimate: Estimate | None) -> None:
    drawn = str(interval_bar(estimate, "naive", chance=0.01))
    assert "nan" not in drawn
    assert all(0 <= float(number) <= 100 for number in re.findall(r'"(-?[\d.]+)%"', drawn))
