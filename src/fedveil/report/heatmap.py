"""The label distribution per client as a picture: a row per label, a column per client, colored by the share.

A few clients have a column each, with their number and counts. Many are sorted by their most frequent label, and
share columns where there are more of them than can be told apart. Colors are in `templates/charts.css`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from markupsafe import Markup

from fedveil.report.drawing import FONT, LINE, characters, svg, text, text_width
from fedveil.tasks.client_labels import ClientLabels

LEVELS = 20  # shades
LEGEND = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
NARROWEST, WIDEST = 5.0, 72.0  # of a column
LOWEST, HIGHEST = 6.0, 20.0  # of a row
MOST_ROWS = 100
TALLEST = 600.0  # of all rows together, unless they are at their lowest
BARS = 34.0
SWATCH = 13.0


@dataclass(frozen=True)
class Column:
    """One client, or the mean of several that stand next to each other."""

    size: float
    shares: list[float]  # of each row's labels among the client's examples


@dataclass(frozen=True)
class Frame:
    """Where the cells are."""

    left: float
    top: float
    across: float  # width of a column
    down: float  # height of a row
    numbered: bool  # every client has a column with its number
    counted: bool  # there is room for the counts, too

    @property
    def gap(self) -> float:
        """Between cells that are large enough to stand apart."""
        return 1.0 if self.across >= 8 and self.down >= 10 else 0.0

    @property
    def heat(self) -> str:
        """The style of cells; without numbers in them their color may be stronger."""
        return "heat" if self.counted else "heat dense"

    def edge(self, column: int) -> int:
        """Where a column starts: at a whole pixel, so that no seam shows between neighbors."""
        return round(self.left + column * self.across)

    def center(self, column: int, row: float) -> tuple[float, float]:
        """Where a text in the middle of a cell starts; rows above the first are negative."""
        return self.left + (column + 0.5) * self.across, self.top + (row + 0.5) * self.down + FONT * 0.35


def heat_map(holdings: ClientLabels, *, title: str, width: float = 720) -> Markup:
    """The picture. A shade means the same share in every such picture, so that two can be compared."""
    together = math.ceil(len(holdings.labels) / MOST_ROWS)  # labels to a row
    names = [_shortened(name, 20 if width > 500 else 12) for name in holdings.labels[::together]]
    counts = [[sum(row[i : i + together]) for i in range(0, len(row), together)] for row in holdings.counts]
    down = min(HIGHEST, max(LOWEST, TALLEST // len(names)))
    every = math.ceil((LINE - 1) / down)  # which rows have room for their name
    number = text_width(f"{max(holdings.sizes):,}")
    left = max(number, *map(text_width, names[::every])) + 10
    room = width - left - 1

    numbered = len(counts) * (number + 6) <= room
    clients = [Column(size, [n / size for n in row]) for size, row in zip(holdings.sizes, counts, strict=True)]
    share_one = 1 if numbered else math.ceil(len(clients) * NARROWEST / room)  # clients to a column
    columns = clients if numbered else _merged(sorted(clients, key=_by_label), share_one)
    across = min(room / len(columns), WIDEST)
    top = LINE * (2 if numbered else 1) + BARS + 16
    frame = Frame(left, top, across, down, numbered, numbered and down >= LINE)

    parts = [_bars(columns, frame, mean=share_one > 1), _cells(columns, frame)]
    parts += [text(names[i], left - 6, frame.center(0, i)[1], "tick end") for i in range(0, len(names), every)]
    if frame.counted:
        parts += [
            text(f"{n:,}", *frame.center(i, j), "count" if n else "count zero")
            for i, row in enumerate(counts)
            for j, n in enumerate(row)
        ]
    below = top + down * len(names)
    if numbered:
        below += LINE
        parts += [text(str(i), frame.center(i, 0)[0], below, "tick middle") for i in range(len(columns))]
    for line in textwrap.wrap(_axis(len(clients), numbered, share_one, together), characters(room)):
        below += LINE
        parts.append(text(line, left, below, "axis-title"))
    legend, below = _legend(frame, below + LINE + 10, width)
    return svg(title, in_words(holdings), width, below + 6, [*parts, *legend])


def in_words(holdings: ClientLabels) -> str:
    """What the picture shows, for those who cannot see it."""
    sizes = holdings.sizes
    return (
        f"{len(sizes):,} client{'s' * (len(sizes) != 1)} with {min(sizes):,} to {max(sizes):,} examples; a client has "
        f"{holdings.labels_per_client:.1f} of {len(holdings.labels):,} labels on average; the mean distance of a "
        f"client's labels to all labels is {holdings.distance:.2f}, by chance {holdings.distance_by_chance:.2f}"
    )


def _by_label(client: Column) -> tuple[int, float, list[int]]:
    """Clients with the same most frequent label next to each other, and of these the likes."""
    first, *others = sorted(range(len(client.shares)), key=lambda i: -client.shares[i])
    return first, -round(client.shares[first], 1), others[:1]


def _merged(clients: Sequence[Column], together: int) -> list[Column]:
    groups = [clients[i : i + together] for i in range(0, len(clients), together)]
    return [
        Column(fmean(one.size for one in group), [fmean(s) for s in zip(*(one.shares for one in group), strict=True)])
        for group in groups
    ]


def _bars(columns: Sequence[Column], frame: Frame, *, mean: bool) -> Markup:
    """How many examples each column has, above the cells."""
    parts = [text("Examples per client" + " (mean)" * mean, frame.left, FONT, "axis-title")]
    largest = max(column.size for column in columns)
    foot = frame.top - 8
    outline = "".join(
        f"M{frame.edge(i)} {foot:g}v{-BARS * column.size / largest:.3g}H{frame.edge(i + 1) - frame.gap:g}V{foot:g}z"
        for i, column in enumerate(columns)
    )
    parts.append(Markup('<path class="amount" d="{}"/>').format(outline))
    if frame.numbered:
        parts += [
            text(f"{column.size:,}", frame.center(i, 0)[0], foot - BARS - 5, "count")
            for i, column in enumerate(columns)
        ]
    else:
        parts.append(text(f"{largest:,.0f}", frame.left - 6, foot - BARS + FONT * 0.8, "tick end"))
        parts.append(text("0", frame.left - 6, foot, "tick end"))
    return Markup("").join(parts)


def _level(share: float) -> int:
    """The shade of a share, steep at first: a label that is hardly there still differs from one that is not."""
    return 0 if share <= 0 else max(1, min(LEVELS, round(LEVELS * share**0.4)))


def _cells(columns: Sequence[Column], frame: Frame) -> Markup:
    """One path per shade; neighbors of a shade are one piece of it where cells do not stand apart."""
    pieces: dict[int, list[str]] = {level: [] for level in range(1, LEVELS + 1)}
    high = frame.down - frame.gap
    for row in range(len(columns[0].shares)):
        y = f"{frame.top + row * frame.down:.5g}"
        shades = [(i, _level(column.shares[row])) for i, column in enumerate(columns)]
        for (_, level), run in groupby(shades, key=lambda shade: (shade[0] if frame.gap else 0, shade[1])):
            places = [i for i, _ in run]
            start, end = frame.edge(places[0]), frame.edge(places[-1] + 1) - frame.gap
            if level:
                pieces[level].append(f"M{start} {y}H{end:g}v{high:.4g}H{start}z")
    ground = Markup('<rect class="ground" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(
        frame.edge(0), frame.top, frame.edge(len(columns)) - frame.edge(0), frame.down * len(columns[0].shares)
    )
    shades_drawn = Markup("").join(
        Markup('<path fill-opacity="{:g}" d="{}"/>').format(level / LEVELS, "".join(found))
        for level, found in pieces.items()
        if found
    )
    return ground + Markup('<g class="{}">{}</g>').format(frame.heat, shades_drawn)


def _axis(clients: int, numbered: bool, share_one: int, together: int) -> str:
    rows = f"; {together} labels to a row, named by the first" if together > 1 else "; a row for each label"
    if numbered:
        return f"Client{rows}"
    columns = f", {share_one} to a column" if share_one > 1 else ""
    return f"{clients:,} clients, sorted by their most frequent label{columns}{rows}"


def _legend(frame: Frame, y: float, width: float) -> tuple[list[Markup], float]:
    """The shades with their shares, on as many lines as they need, and where they end."""
    parts = []
    for line in textwrap.wrap("Share of a client's examples that have the label", characters(width)):
        parts.append(text(line, 0, y, "axis-title"))
        y += LINE + 4
    x = 0.0
    for share in LEGEND:
        label = f"{share:.0%}".replace("%", "\u00a0%")
        needed = SWATCH + 5 + text_width(label) + 12
        if x + needed > width:
            x, y = 0.0, y + LINE + 4
        box = f'x="{x:.1f}" y="{y - SWATCH + 2:.1f}" width="{SWATCH:g}" height="{SWATCH:g}"'
        parts.append(Markup(f'<rect class="swatch" {box}/>'))
        shade = Markup(f'<g class="{{}}"><rect fill-opacity="{_level(share) / LEVELS:g}" {box}/></g>')
        parts += [shade.format(frame.heat), text(label, x + SWATCH + 5, y, "tick")]
        x += needed
    return parts, y


def _shortened(name: str, most: int) -> str:
    """A name without its middle where it is too long: names often differ at the end.

    >>> _shortened("choroidal neovascularization", 20)
    'choroidal neova…tion'
    """
    return name if len(name) <= most else f"{name[: most - 5]}…{name[-4:]}"
