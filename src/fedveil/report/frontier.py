"""The page of a comparison: the frontier of each question, the numbers, and the reconstructions behind every point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedveil.auditing.again import config_toml
from fedveil.auditing.result import Question
from fedveil.files import write_atomically
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.modalities import modality
from fedveil.report import formatting
from fedveil.report.environment import environment
from fedveil.report.frontier_chart import Drawn, Family, Frame, Mark, frontier
from fedveil.report.pictures import data_uri
from fedveil.study.advice import advice
from fedveil.study.comparison import QUESTIONS, Comparison, Leak, Point

Pictures = Mapping[str, NDArray[np.float32]]
GAP = 2  # pixels between two pictures of a strip
WHO = {"naive": "does not know the defense", "adaptive": "knows the defense"}


@dataclass(frozen=True)
class Card:
    """What is shown of a point when it is pointed at."""

    number: int
    title: str
    settings: list[str]
    facts: list[tuple[str, str]]
    shown: str  # whose reconstructions the strip has; "" without pictures
    front: bool


@dataclass(frozen=True)
class Figure:
    """The frontier of one question, for wide and for narrow windows."""

    question: str
    wide: Drawn
    narrow: Drawn
    caption: str


def render_frontier(comparison: Comparison, pictures: Pictures) -> str:
    """The page as one HTML document without scripts. All text is escaped."""
    strips = {name: _strip(each) for name, each in pictures.items() if each.ndim == 4 and len(each)}
    cards = [_card(comparison, comparison.undefended, 0, "undefended" in strips)]
    cards += [_card(comparison, p, n + 1, f"point {n}" in strips) for n, p in enumerate(comparison.points)]
    uris = {0: strips.get("undefended"), **{n + 1: strips.get(f"point {n}") for n in range(len(comparison.points))}}
    return (
        environment()
        .get_template("compare.html")
        .render(
            comparison=comparison,
            advice=advice(comparison),
            figures=[_figure(comparison, question) for question in comparison.questions],
            cards=cards,
            strips={number: uri for number, uri in uris.items() if uri},
            originals=strips.get("originals"),
            pictured=len(pictures["originals"]) if "originals" in strips else 0,
            ratio=_ratio(pictures["originals"]) if "originals" in strips else 1.0,
            table=comparison.table(),
            config=config_toml({**comparison.config, "seed": comparison.seeds[0]}),
        )
    )


def write_frontier(comparison: Comparison, pictures: Pictures, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_atomically(path, render_frontier(comparison, pictures).encode())


def _figure(comparison: Comparison, question: Question) -> Figure:
    undefended = _mark(comparison, comparison.undefended, 0, question)
    assert undefended is not None
    families: dict[str, list[Mark]] = {}
    for number, point in enumerate(comparison.points, 1):
        mark = _mark(comparison, point, number, question)
        if mark is not None:
            families.setdefault(point.family, []).append(mark)
    floor, ceiling = comparison.floors.get(question), comparison.undefended.leaked(question)
    assert ceiling is not None
    share, measured = METRICS[ceiling.measure].share, comparison.measured
    better = "less" if measured.lower_is_better else "more"
    frame = Frame(
        title=f"{QUESTIONS[question]} {comparison.utility} against leakage",
        x_title=f"{_leaks(comparison, question)} → leaks more",
        y_title=f"test {comparison.utility} (up: {'worse' if measured.lower_is_better else 'more useful'})",
        percent=measured.share,
        floor=None if floor is None else floor.found.mean,
        ceiling=ceiling.found.mean,
        undefended=undefended,
        share=share,
    )
    lines = [Family(name, marks, place) for place, (name, marks) in enumerate(families.items())]
    caption = (
        "Each line is a defense from weak to strong, drawn at the stronger attacker; hollow marks: the attacker who "
        f"does not know the defense. Bars are 95 % intervals over {modality(comparison.modality).words.many} and "
        f"seeds. The gray border is the Pareto front: no point has {better} {comparison.utility} at no more leakage. "
        "✕ is no defense."
    )
    asked = QUESTIONS[question]
    return Figure(asked, frontier(lines, frame), frontier(lines, frame, width=440, height=420), caption)


def _leaks(comparison: Comparison, question: Question) -> str:
    words = modality(comparison.modality).words
    return {
        "reconstruct": f"{words.many} picked out of {comparison.candidates} by what was rebuilt",
        "link": f"updates linked to the right one of {comparison.candidates}",
        "member": "AUC of telling members from others (0.5: chance)",
    }[question]


def _mark(comparison: Comparison, point: Point, number: int, question: Question) -> Mark | None:
    leak = point.leaked(question)
    if leak is None:
        return None
    naive = point.leaks[question].get("naive")
    less = naive.found.mean if naive is not None and naive.found.mean < leak.found.mean else None
    words = (
        f"{_title(point)}: {comparison.utility} {comparison.measured.shown(point.utility.mean)}, leaks {_value(leak)}"
    )
    return Mark(number, leak.found, point.utility, less, words, question in point.front)


def _card(comparison: Comparison, point: Point, number: int, pictured: bool) -> Card:
    facts = [(f"test {comparison.utility}", formatting.utility(point.utility, comparison.utility))]
    if point.loss is not None:
        facts.append(("change", formatting.utility_change(point.loss, comparison.utility)))
    for question in comparison.questions:
        name = {"reconstruct": "rebuilt", "link": "linked", "member": "member AUC"}[question]
        for role, leak in point.leaks.get(question, {}).items():
            if point.family and role == "ceiling":
                continue
            who = f", {WHO[role]}" if role in WHO else ""
            facts.append((f"{name}{who}", f"{_value(leak)} [{_ends(leak)}]"))
    if point.slowdown is not None:
        facts.append(("a round takes", f"{point.slowdown:.2f} times as long"))
    if point.family:
        facts.append(("formal guarantee", point.guarantee.removeprefix("Formal guarantee: ")))
        if not point.informed:
            facts.append(("informed attacker", "none was tried: the defense does not say what such a one would do"))
    settings = [
        f"{name}: " + ", ".join(f"{key} {formatting.setting(value)}" for key, value in fields.items())
        for name, fields in point.settings.items()
    ]
    return Card(number, _title(point), settings, facts, point.pictures if pictured else "", bool(point.front))


def _title(point: Point) -> str:
    return f"{point.family}{f', {point.moved}' if point.moved else ''}" if point.family else "no defense"


def _value(leak: Leak) -> str:
    return METRICS[leak.measure].format(leak.found.mean)


def _ends(leak: Leak) -> str:
    metric = METRICS[leak.measure]
    factor, digits = (100, 0) if metric.share else (1, 2)
    return "–".join(f"{factor * value:.{digits}f}" for value in (leak.found.low, leak.found.high))


def _ratio(pictures: NDArray[np.float32]) -> float:
    """The width of a strip over its height."""
    count, _, height, width = pictures.shape
    return float((count * width + (count - 1) * GAP) / height)


def _strip(pictures: NDArray[np.float32]) -> str:
    """Pictures beside each other as one, with a gap."""
    count, channels, height, width = pictures.shape
    strip = np.ones((channels, height, count * width + (count - 1) * GAP), dtype=np.float32)
    for place, picture in enumerate(pictures):
        start = place * (width + GAP)
        strip[:, :, start : start + width] = picture
    return data_uri(strip)
