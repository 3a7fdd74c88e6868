"""The figures of a study as charts and grids of pictures for its page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from fedveil.report.charts import Axis, Series, axes, line_chart, spread
from fedveil.report.drawing import FONT, LINE, characters, svg, text, text_width
from fedveil.report.frontier_chart import COLORS, SHAPES, shape
from fedveil.report.pictures import data_uri
from fedveil.report.scales import drawable, linear_scale
from fedveil.study.figures import Chart, Curve, Drawing, Pictures

LABEL = 20  # characters in a line of a label
SHARES = ("accuracy", "test accuracy", "share of the entries")  # drawn in percent


@dataclass(frozen=True)
class Uris:
    """A line of pictures."""

    label: str
    uris: list[str]


@dataclass(frozen=True)
class Shown:
    """A figure as the page has it: a chart, or lines of pictures."""

    title: str
    svg: Markup | None = None
    strips: list[Uris] = field(default_factory=list)


def shown(drawing: Drawing) -> Shown:
    """A figure drawn."""
    if isinstance(drawing, Pictures):
        strips = [Uris(strip.label, [data_uri(each) for each in strip.pictures]) for strip in drawing.strips]
        return Shown(drawing.title, strips=strips)
    return Shown(drawing.title, svg=_scatter(drawing) if drawing.points else _lines(drawing))


def _lines(chart: Chart) -> Markup:
    # A published line has the color of ours with the same name, and dots in place of the stroke.
    names = list(dict.fromkeys(_ours(curve.label) for curve in chart.curves))
    series = []
    for curve in chart.curves:
        style = f"f{names.index(_ours(curve.label)) % COLORS}" + (" printed" if curve.published else "")
        wide = any(each.high > each.low for each in curve.y)
        series.append(
            Series(
                curve.label,
                curve.x,
                [each.mean for each in curve.y],
                [each.low for each in curve.y] if wide else (),
                [each.high for each in curve.y] if wide else (),
                style,
            )
        )
    percent = chart.y in SHARES and all(0 <= each.mean <= 1 for curve in chart.curves for each in curve.y)
    return line_chart(series, x=Axis(chart.x, log=chart.log), y=Axis(chart.y, percent=percent), title=chart.title)


def _ours(label: str) -> str:
    return label.removesuffix("published").removesuffix(", ") or "ours"


def _scatter(chart: Chart, width: float = 720, height: float = 400) -> Markup:
    """Points with their intervals in both directions, a color and a mark for each series."""
    ends = [value for curve in chart.curves for e in curve.x_interval for value in (e.low, e.high)]
    heights = [value for curve in chart.curves for e in curve.y for value in (e.low, e.high)]
    x, y = linear_scale(filter(drawable, ends)), linear_scale(filter(drawable, heights), percent=chart.y in SHARES)
    labels = [textwrap.wrap(curve.label, LABEL) or [""] for curve in chart.curves]
    left = max(text_width(label) for label in y.labels) + 10
    right = width - max(text_width(line) for label in labels for line in label) - 34
    y_title = textwrap.wrap(chart.y, characters(width - 8))
    top = LINE * len(y_title) + 14
    bottom = max(height - LINE * 2 - 12, top + LINE * sum(map(len, labels)) + 6 * len(labels))

    def at(across: float, up: float) -> tuple[float, float]:
        return left + x.place(across) * (right - left), bottom - y.place(up) * (bottom - top)

    parts = [text(line, 0, LINE * (i + 0.8), "axis-title") for i, line in enumerate(y_title)]
    parts += axes(x, y, (left, right, top, bottom))
    parts.append(text(chart.x, right, bottom + LINE * 2 + 6, "axis-title end"))
    for place, curve in enumerate(chart.curves):
        parts += _points(curve, at, f"f{place % COLORS}", SHAPES[place % len(SHAPES)])
    last = [at(0, curve.y[-1].mean)[1] for curve in chart.curves]
    centers = spread(last, [LINE * len(label) + 6 for label in labels], top - 6, bottom + 6)
    for place, (label, center) in enumerate(zip(labels, centers, strict=True)):
        parts.append(shape(SHAPES[place % len(SHAPES)], right + 14, center, f"mark f{place % COLORS}"))
        first = center - LINE * (len(label) - 1) / 2 + FONT * 0.35
        parts += [text(line, right + 24, first + LINE * i, "label") for i, line in enumerate(label)]
    return svg(chart.title, _told(chart.curves), width, bottom + LINE * 3, parts)


def _points(curve: Curve, at: object, style: str, mark: str) -> list[Markup]:
    assert callable(at)
    parts = []
    for across, up in zip(curve.x_interval, curve.y, strict=True):
        (x, y), (low, _), (high, _) = at(across.mean, up.mean), at(across.low, up.mean), at(across.high, up.mean)
        (_, least), (_, most) = at(across.mean, up.low), at(across.mean, up.high)
        bars = f"M{low:.1f} {y:.1f}H{high:.1f}M{x:.1f} {least:.1f}V{most:.1f}"
        parts.append(Markup('<path class="spread {}" d="{}"/>').format(style, bars))
        parts.append(shape(mark, x, y, f"mark {style}"))
    return parts


def _told(curves: Sequence[Curve]) -> str:
    return ". ".join(
        f"{name}: {up.mean:.3g} at {across:.3g}"
        for curve in curves
        for name, across, up in zip(curve.names, curve.x, curve.y, strict=True)
    )
