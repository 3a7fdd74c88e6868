"""The frontier as inline SVG: utility up, leakage to the right, each defense a line over its strength.

Points are drawn at the stronger of both attackers; a hollow mark shows the one who does not know the defense. Families
differ in color and in the form of their marks, and are labeled at the side. Styles are in `templates/compare.css`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedveil.auditing.result import Estimate
from fedveil.report.charts import axes, spread
from fedveil.report.drawing import FONT, LINE, characters, svg, text, text_width
from fedveil.report.scales import Scale, linear_scale

COLORS = 7  # families of different color in `compare.css`; after that they differ in their marks
SHAPES = ("circle", "square", "diamond", "triangle")
LABEL = 20  # letters of a line beside the chart

Place = tuple[float, float, float, float]  # left, right, top, bottom
At = Callable[[float, float], tuple[float, float]]  # from leakage and utility to the canvas


@dataclass(frozen=True)
class Mark:
    """A point of the chart."""

    number: int  # among all points of the page
    leak: Estimate
    utility: Estimate
    naive: float | None  # what the attacker gets who does not know the defense, where that is less
    words: str  # for those who cannot see it
    front: bool


@dataclass(frozen=True)
class Family:
    """The points of one defense, from weak to strong."""

    label: str
    marks: Sequence[Mark]
    place: int  # among the families: decides color and mark

    @property
    def style(self) -> str:
        """The class of its color."""
        return f"f{self.place % COLORS}"

    @property
    def shape(self) -> str:
        """The form of its marks."""
        return SHAPES[self.place // COLORS % len(SHAPES)] if self.place >= COLORS else SHAPES[self.place % len(SHAPES)]


@dataclass(frozen=True)
class Frame:
    """What stands around the points."""

    title: str
    x_title: str
    y_title: str
    percent: bool  # whether utility is a share
    floor: float | None
    ceiling: float | None
    undefended: Mark
    share: bool = True  # whether leakage is one


@dataclass(frozen=True)
class Spot:
    """Where a mark is, in percent of the chart's width and height: there the page puts something to point at."""

    number: int
    left: float
    top: float
    words: str


@dataclass(frozen=True)
class Drawn:
    """A chart with its spots."""

    svg: Markup
    spots: list[Spot]


def frontier(families: Sequence[Family], frame: Frame, *, width: float = 720, height: float = 430) -> Drawn:
    """The chart of one question."""
    marks = [mark for family in families for mark in family.marks]
    everyone = [*marks, frame.undefended]
    x = _leak_scale(everyone, frame)
    y = linear_scale(
        [value for mark in everyone for value in (mark.utility.low, mark.utility.high)], percent=frame.percent
    )
    labels = [textwrap.wrap(family.label, LABEL) or [""] for family in families]
    left = max(text_width(label) for label in y.labels) + 10
    beside = max((text_width(line) for label in labels for line in label), default=0.0)
    right = width - beside - 34
    y_title = textwrap.wrap(frame.y_title, characters(width - 8))
    x_title = textwrap.wrap(frame.x_title, characters(right))
    top = LINE * (len(y_title) + 1) + 14
    bottom = max(height - LINE * (len(x_title) + 1) - 12, top + LINE * sum(map(len, labels)) + 6 * len(labels))
    height = bottom + LINE * (len(x_title) + 1) + 12

    def at(leak: float, utility: float) -> tuple[float, float]:
        return left + x.place(leak) * (right - left), bottom - y.place(utility) * (bottom - top)

    parts = [text(line, 0, LINE * (i + 0.8), "axis-title") for i, line in enumerate(y_title)]
    parts += axes(x, y, (left, right, top, bottom), first=0.0)
    parts += [text(line, right, bottom + LINE * (i + 2) + 6, "axis-title end") for i, line in enumerate(x_title)]
    parts += _limits(frame, at, (left, right, top, bottom), y)
    parts.append(_staircase([mark for mark in everyone if mark.front], at, right, bottom))
    for family in families:
        parts += _family(family, at)
    parts.append(_undefended(frame.undefended, at))
    ends = [at(family.marks[0].leak.mean, family.marks[0].utility.mean)[1] for family in families]
    sizes = [LINE * len(label) + 6 for label in labels]
    for family, label, center in zip(families, labels, spread(ends, sizes, top - 6, bottom + 6), strict=True):
        parts.append(shape(family.shape, right + 14, center, f"mark {family.style}"))
        first = center - LINE * (len(label) - 1) / 2 + FONT * 0.35
        parts += [text(line, right + 24, first + LINE * i, "label") for i, line in enumerate(label)]
    spots = []
    for mark in everyone:
        across, down = at(mark.leak.mean, mark.utility.mean)
        spots.append(Spot(mark.number, 100 * across / width, 100 * down / height, mark.words))
    return Drawn(svg(frame.title, ". ".join(mark.words for mark in everyone), width, height, parts), spots)


def _leak_scale(marks: Sequence[Mark], frame: Frame) -> Scale:
    values = [value for mark in marks for value in (mark.leak.low, mark.leak.high)]
    values += [mark.naive for mark in marks if mark.naive is not None]
    values += [value for value in (frame.floor, frame.ceiling) if value is not None]
    return linear_scale(values, percent=frame.share)


def _limits(frame: Frame, at: At, box: Place, y: Scale) -> list[Markup]:
    """Floor and ceiling, labeled above the chart."""
    left, right, top, bottom = box
    told = [
        (value, name) for value, name in ((frame.floor, "floor"), (frame.ceiling, "no defense")) if value is not None
    ]
    parts, edge = [], left - 40
    for value, name in sorted(told):
        across = at(value, y.low)[0]
        parts.append(Markup('<path class="limit" d="M{:.1f} {:.1f}V{:.1f}"/>').format(across, top - 4, bottom))
        wide = text_width(name)
        start = max(edge + 4, min(across - wide / 2, right - wide / 2))
        parts.append(text(name, start, top - 8, "limit-label"))
        edge = start + wide
    return parts


def _staircase(front: Sequence[Mark], at: At, right: float, bottom: float) -> Markup:
    """The border of what is reached: between two points of the front only the lower utility is certain."""
    if not front:
        return Markup("")
    points = [at(mark.leak.mean, mark.utility.mean) for mark in sorted(front, key=lambda mark: mark.leak.mean)]
    path = f"M{points[0][0]:.1f} {bottom:.1f}V{points[0][1]:.1f}"
    path += "".join(f"H{across:.1f}V{down:.1f}" for across, down in points[1:]) + f"H{right:.1f}"
    return Markup('<path class="front" d="{}"/>').format(path)


def _family(family: Family, at: At) -> list[Markup]:
    places = [at(mark.leak.mean, mark.utility.mean) for mark in family.marks]
    parts = []
    if len(places) > 1:
        line = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        parts.append(Markup('<path class="sweep {}" d="{}"/>').format(family.style, line))
    for mark, (across, down) in zip(family.marks, places, strict=True):
        (low, _), (high, _) = at(mark.leak.low, mark.utility.mean), at(mark.leak.high, mark.utility.mean)
        (_, least), (_, most) = at(mark.leak.mean, mark.utility.low), at(mark.leak.mean, mark.utility.high)
        bars = f"M{low:.1f} {down:.1f}H{high:.1f}M{across:.1f} {least:.1f}V{most:.1f}"
        parts.append(Markup('<path class="spread {}" d="{}"/>').format(family.style, bars))
        if mark.naive is not None:
            less = at(mark.naive, mark.utility.mean)[0]
            parts.append(
                Markup('<path class="gap {}" d="M{:.1f} {:.1f}H{:.1f}"/>').format(family.style, less, down, across)
            )
            parts.append(shape(family.shape, less, down, f"hollow {family.style}", 3.5))
    parts += [
        shape(family.shape, *place, f"mark {family.style}{' best' if mark.front else ''}", 6.0 if mark.front else 4.5)
        for mark, place in zip(family.marks, places, strict=True)
    ]
    return parts


def _undefended(mark: Mark, at: At) -> Markup:
    across, down = at(mark.leak.mean, mark.utility.mean)
    cross = f"M{across - 6:.1f} {down - 6:.1f}l12 12m0 -12l-12 12"
    return Markup('<path class="undefended" d="{}"/>').format(cross)


def shape(name: str, x: float, y: float, style: str, size: float = 4.5) -> Markup:
    if name == "circle":
        return Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:g}"/>').format(style, x, y, size)
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
        "triangle": [(0, -1.25), (1.15, 0.85), (-1.15, 0.85)],
    }[name]
    path = "M" + "L".join(f"{x + size * a:.1f} {y + size * b:.1f}" for a, b in corners) + "Z"
    return Markup('<path class="{}" d="{}"/>').format(style, path)
