"""Charts as inline SVG: they scale, print, follow dark mode through the page's CSS and need no script.

Lines are labeled at their ends instead of in a legend, and differ in dash pattern as well as in color. Colors, dashes
and fonts are in `templates/charts.css`, under the class named by `Series.style`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedveil.auditing.result import Estimate
from fedveil.report.drawing import FONT, LINE, characters, svg, text, text_width
from fedveil.report.scales import Scale, drawable, linear_scale, log_scale

# Longer series are thinned: more points than pixels only make the file larger.
MOST_POINTS = 400

Point = tuple[float, float]
Place = Callable[[Point], Point]  # from values to the canvas


@dataclass(frozen=True)
class Series:
    """A line with its label and, where given, an interval around each of its points (NaN: none)."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = "ceiling"  # CSS class with the color and the dash pattern


@dataclass(frozen=True)
class Axis:
    """What an axis shows. The title says in which direction things get more private or more useful."""

    title: str
    percent: bool = False  # values are fractions
    whole: bool = False  # ticks at whole numbers
    log: bool = False  # logarithmic where that helps


def line_chart(
    series: Sequence[Series], *, x: Axis, y: Axis, title: str, width: float = 720, height: float = 300
) -> Markup:
    """Lines with intervals as bands. Values that are not finite leave gaps; an empty chart says that it is empty."""
    series = [_thinned(one) for one in series]
    shown = [one for one in series if any(True for _ in _points(one))]
    if not shown:
        return _empty_chart(title, width)

    places = [p for one in shown for p, _ in _points(one)]
    x_log = log_scale(places) if x.log else None
    x_scale = x_log or linear_scale(places, count=6, whole=x.whole, tight=True)
    heights = [value for one in shown for value in (*one.y, *one.low, *one.high)]
    y_log = log_scale(heights) if y.log else None
    y_scale = y_log or linear_scale(heights, percent=y.percent, whole=y.whole)

    labels = [textwrap.wrap(one.label, 18) or [""] for one in shown]
    y_title = textwrap.wrap(y.title + (" (log scale)" if y_log else ""), characters(width - 8))
    left = max(text_width(label) for label in y_scale.labels or ("",)) + 10
    right = width - max(text_width(line) for label in labels for line in label) - 22
    x_title = textwrap.wrap(x.title + (" (log scale)" if x_log else ""), characters(right))
    top = LINE * len(y_title) + 14
    # A crowd of labels makes the chart taller instead of overlapping.
    bottom = max(height - LINE * (len(x_title) + 1) - 12, top + LINE * sum(map(len, labels)) + 4 * len(labels))
    height = bottom + LINE * (len(x_title) + 1) + 12

    def place(point: Point) -> Point:
        across, up = x_scale.place(point[0]), y_scale.place(point[1])
        return left + across * (right - left), bottom - up * (bottom - top)

    parts = [text(line, 0, LINE * (i + 0.8), "axis-title") for i, line in enumerate(y_title)]
    parts += axes(x_scale, y_scale, (left, right, top, bottom))
    parts += [text(line, right, bottom + LINE * (i + 2) + 6, "axis-title end") for i, line in enumerate(x_title)]
    parts += [_band(one, index, place) for index, one in enumerate(shown)]
    parts += [_line(one, place) for one in shown]

    ends = [place(list(_points(one))[-1]) for one in shown]
    centers = spread([end[1] for end in ends], [LINE * len(label) + 2 for label in labels], top - 6, bottom + 6)
    for one, label, end, center in zip(shown, labels, ends, centers, strict=True):
        parts.append(
            Markup('<path class="leader {}" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(
                one.style, *end, right + 12, center
            )
        )
        first = center - LINE * (len(label) - 1) / 2 + FONT * 0.35
        parts += [text(line, right + 16, first + LINE * i, "label") for i, line in enumerate(label)]

    description = ". ".join(_told(one, y) for one in shown)
    return svg(title, description, width, height, parts)


def interval_bar(
    estimate: Estimate | None, style: str, chance: float | None = None, bound: float | None = None
) -> Markup:
    """A bar from 0 to a share, its interval as a whisker; chance is a dashed tick, a formal bound a solid one.

    The numbers stand beside it as text.

    It has no viewBox: percentages let it take the width there is, while the strokes keep theirs.
    """
    parts = [Markup('<rect class="track" x="0" y="5" width="100%" height="8" rx="2"/>')]
    if estimate is not None and drawable(estimate.mean):
        mean, low, high = (
            min(max(value if drawable(value) else estimate.mean, 0.0), 1.0) * 100
            for value in (estimate.mean, estimate.low, estimate.high)
        )
        bar = Markup('<rect class="bar {}" x="0" y="5" width="{:.1f}%" height="8" rx="2"/>')
        whisker = Markup('<line class="whisker" x1="{:.1f}%" x2="{:.1f}%" y1="{}" y2="{}"/>')
        parts.append(bar.format(style, mean))
        if estimate.count > 1:
            parts += [whisker.format(low, high, 9, 9), *(whisker.format(end, end, 5, 13) for end in (low, high))]
    if chance is not None:
        parts.append(Markup('<line class="chance" x1="{0:.1f}%" x2="{0:.1f}%" y1="0" y2="18"/>').format(chance * 100))
    if bound is not None and drawable(bound):
        at = min(max(bound, 0.0), 1.0) * 100
        parts.append(Markup('<line class="limit" x1="{0:.1f}%" x2="{0:.1f}%" y1="0" y2="18"/>').format(at))
    return Markup('<svg class="interval" aria-hidden="true" focusable="false">{}</svg>').format(Markup("").join(parts))


def spread(targets: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centers near the targets such that things of these sizes do not overlap and stay between low and high.

    >>> spread([10.0, 11.0, 90.0], [10.0, 10.0, 10.0], 0.0, 100.0)
    [10.0, 20.0, 90.0]
    >>> spread([99.0, 98.0], [10.0, 10.0], 0.0, 100.0)
    [95.0, 85.0]
    """
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    centers = list(targets)
    edge = low
    for i in order:
        centers[i] = max(centers[i], edge + sizes[i] / 2)
        edge = centers[i] + sizes[i] / 2
    edge = high
    for i in reversed(order):
        centers[i] = min(centers[i], edge - sizes[i] / 2)
        edge = centers[i] - sizes[i] / 2
    return centers


def _points(series: Series) -> Iterator[Point]:
    return ((a, b) for a, b in zip(series.x, series.y, strict=False) if drawable(a) and drawable(b))


def _thinned(series: Series) -> Series:
    count = min(len(series.x), len(series.y))
    if count <= MOST_POINTS:
        return series
    step = math.ceil(count / MOST_POINTS)
    picked = sorted({*range(0, count, step), count - 1})

    def pick(values: Sequence[float]) -> list[float]:
        return [values[i] for i in picked if i < len(values)]

    return Series(series.label, pick(series.x), pick(series.y), pick(series.low), pick(series.high), series.style)


def _runs(items: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """The stretches without a gap, a gap being an item with a value that cannot be drawn."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for item in items:
        if all(map(drawable, item)):
            runs[-1].append(item)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _line(series: Series, place: Place) -> Markup:
    parts = []
    for run in _runs(list(zip(series.x, series.y, strict=False))):
        points = [place((a, b)) for a, b in run]
        if len(points) == 1:
            dot = Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>')
            parts.append(dot.format(series.style, *points[0]))
        else:
            parts.append(Markup('<path class="line {}" d="{}"/>').format(series.style, _path(points)))
    return Markup("").join(parts)


def _band(series: Series, index: int, place: Place) -> Markup:
    """The intervals: a band where neighbors have one, a whisker where a point stands alone."""
    parts = []
    for run in _runs(list(zip(series.x, series.low, series.high, strict=False))):
        lower = [place((a, low)) for a, low, _ in run]
        upper = [place((a, high)) for a, _, high in run]
        if len(run) > 1:
            outline = _path([*lower, *reversed(upper)]) + "Z"
            parts.append(Markup('<path class="band {}" d="{}"/>').format(series.style, outline))
        else:
            across = lower[0][0] - 5 * index  # whiskers of several series stand beside each other
            bar = f"M{across:.1f} {lower[0][1]:.1f}V{upper[0][1]:.1f}"
            caps = "".join(f"M{across - 3:.1f} {end[1]:.1f}h6" for end in (lower[0], upper[0]))
            parts.append(Markup('<path class="whisker {}" d="{}"/>').format(series.style, bar + caps))
    return Markup("").join(parts)


def axes(x: Scale, y: Scale, box: tuple[float, float, float, float], first: float = -math.inf) -> list[Markup]:
    """Grid lines, and ticks with their labels; of those on the x axis none begins before `first`.

    box: left, right, top and bottom.
    """
    left, right, top, bottom = box
    parts = []
    for tick, label in zip(y.ticks, y.labels, strict=True):
        at = bottom - y.place(tick) * (bottom - top)
        parts.append(Markup('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>').format(left, at, right))
        parts.append(text(label, left - 6, at + FONT * 0.35, "tick end"))
    parts.append(Markup('<path class="axis" d="M{:.1f} {:.1f}H{:.1f}"/>').format(left, bottom, right))
    edge = first
    for tick, label in zip(x.ticks, x.labels, strict=True):
        at = left + x.place(tick) * (right - left)
        parts.append(Markup('<path class="axis" d="M{:.1f} {:.1f}v4"/>').format(at, bottom))
        if at - text_width(label) / 2 > edge:
            parts.append(text(label, at, bottom + LINE + 4, "tick middle"))
            edge = at + text_width(label) / 2 + 6
    return parts


def _told(series: Series, axis: Axis) -> str:
    """A series in words, for those who cannot see it."""
    points = list(_points(series))

    def number(value: float) -> str:
        return f"{value * 100:.1f} %" if axis.percent else f"{value:.3g}"

    (start, first), (end, last) = points[0], points[-1]
    return f"{series.label}: {number(first)} at {start:g}, {number(last)} at {end:g}"


def _empty_chart(title: str, width: float) -> Markup:
    note = text("Nothing to draw: no finite values.", 0, LINE * 1.5, "axis-title")
    return svg(title, "Nothing to draw.", width, LINE * 2.5, [note])
