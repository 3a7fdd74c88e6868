"""Who holds what: the picture of the label distribution with its facts, in the report or as a file of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from fedveil.errors import FedveilError
from fedveil.files import writable_folder, write_atomically
from fedveil.report.environment import environment
from fedveil.report.heatmap import heat_map
from fedveil.report.view import WIDTHS
from fedveil.tasks.client_labels import ClientLabels

SUFFIXES = (".html", ".svg")


@dataclass(frozen=True)
class Held:
    """What a page shows of who holds what."""

    facts: list[tuple[str, str]]
    charts: dict[str, Markup]
    caption: str


def held(holdings: ClientLabels) -> Held:
    """The facts, the picture for wide and narrow pages (none of running text), and how to read it."""
    title = "How the labels lie over the clients"
    widths = WIDTHS if holdings.labels else {}
    charts = {name: heat_map(holdings, title=title, width=width) for name, width in widths.items()}
    return Held(facts(holdings), charts, caption(holdings))


def facts(holdings: ClientLabels) -> list[tuple[str, str]]:
    """The numbers beside the picture."""
    sizes = holdings.sizes
    found = [
        ("clients", f"{len(sizes):,}"),
        ("partition", holdings.partition),
        ("training examples", f"{sum(sizes):,}"),
        ("smallest and largest client", f"{min(sizes):,} and {max(sizes):,}"),
    ]
    if holdings.labels:
        by_chance = holdings.distance_by_chance
        found += [
            ("labels per client, mean", f"{holdings.labels_per_client:.1f} of {len(holdings.labels):,}"),
            ("distance to all labels, mean", f"{holdings.distance:.2f} (by chance {by_chance:.2f})"),
        ]
    return [(name, value) for name, value in found if value]


def caption(holdings: ClientLabels) -> str:
    """How to read the picture and its one number."""
    if not holdings.labels:
        return "The examples are running text: there are no labels to count."
    several = " An example counts for each label that it has." if holdings.several else ""
    return (
        "The stronger the color, the larger the share of the client's examples that have the label."
        f"{several} The distance is the total variation between a client's labels and all labels together, the mean "
        "over clients: 0 where all clients are alike, near 1 where hardly two are. Small clients differ by chance: "
        "beside it stands what labels dealt at random would give."
    )


def check_picture_path(path: Path) -> None:
    """Refuse what `write_picture` cannot write, before the data are read."""
    if path.suffix.lower() not in SUFFIXES:
        raise FedveilError(f"{path} must end in {' or '.join(SUFFIXES)}: a page, or the picture alone")


def write_picture(holdings: ClientLabels, title: str, path: Path) -> None:
    """Write a page (.html) or the picture alone (.svg)."""
    check_picture_path(path)
    shown = held(holdings)
    writable_folder(path.parent)
    if path.suffix.lower() == ".html":
        content = environment().get_template("data.html").render(title=title, holdings=shown)
    else:
        content = _alone(shown.charts["wide"])
    write_atomically(path, content.encode())


def _alone(chart: Markup, margin: int = 16) -> str:
    """A chart with the style and the margin that a page would give it."""
    style = "".join(environment().get_template(name).render() for name in ("colors.css", "charts.css"))
    own = ":root { background: var(--paper); font-family: system-ui, sans-serif; }"
    head, _, rest = str(chart).partition(">")
    width, height = (int(side) for side in re.findall(r'viewBox="0 0 (\d+) (\d+)"', head)[0])
    sides = f"{width + 2 * margin} {height + 2 * margin}"
    head = head.replace(f"0 0 {width} {height}", f"{-margin} {-margin} {sides}")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}{own}</style>{rest}'
