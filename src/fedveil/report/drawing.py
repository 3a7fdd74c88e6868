"""The pieces that charts are drawn with: text, its width, and the frame with its words for those who cannot see it."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

FONT = 13.0
LINE = 16.0
# The reader's font is not known here; this is the width of a character in a wide one (DejaVu Sans), in font sizes.
CHARACTER = 0.62


def text_width(content: str) -> float:
    """How much room a text needs at most."""
    return CHARACTER * FONT * len(content)


def characters(width: float) -> int:
    """How many characters fit."""
    return max(10, int(width / (CHARACTER * FONT)))


def text(content: str, x: float, y: float, style: str) -> Markup:
    """A line of text; `y` is its baseline."""
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(style, x, y, content)


def svg(title: str, description: str, width: float, height: float, parts: Sequence[Markup]) -> Markup:
    """A chart of these parts."""
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {:g} {:.0f}"><title>{}</title><desc>{}</desc>{}</svg>'
    ).format(width, height, escape(title), escape(description), Markup("\n").join(parts))
