"""A leaderboard: every defense on the same tasks under the same attacks, the least leakage first at equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import Estimate, Question
from fedveil.study.comparison import QUESTIONS, Leak, Point
from fedveil.study.definition import Group, Scaled
from fedveil.study.folding import floors_of, point_of
from fedveil.study.strengths import Setting
from fedveil.study.tables import Table

# What counts as equal cost: the utility that is lost at most, in points.
COSTS = (0.01, 0.05, 0.2)
HEADS = {"reconstruct": "rebuilt", "link": "linked", "member": "member AUC"}


@dataclass(frozen=True)
class Standing:
    """A defense on one board."""

    row: str
    point: Point

    @property
    def loss(self) -> float:
        """The utility that it costs; where there is no paired difference, none that is known."""
        return 0.0 if self.point.loss is None else max(-self.point.loss.mean, 0.0)

    @property
    def cost(self) -> int:
        """The place of its class of cost in `COSTS`."""
        return next((place for place, most in enumerate(COSTS) if self.loss <= most), len(COSTS))

    @property
    def leak(self) -> float:
        """What the strongest attacker gets by the worst question, above chance: what boards are sorted by.

        Shares from 0 on; an AUC from 0.5 on, stretched to the same length.
        """
        found = {question: self.point.leaked(question) for question in QUESTIONS}
        return max((_above(question, leak) for question, leak in found.items() if leak is not None), default=0.0)


@dataclass(frozen=True)
class Board:
    """One task: a group of the study."""

    name: str
    undefended: Standing | None
    floors: Mapping[Question, Leak]
    standings: Sequence[Standing]  # sorted: first what costs least, within a class what leaks least
    missing: Mapping[str, str]  # rows that are not there, and why


def boards(scaled: Scaled, audits: Mapping[str, AuditResult], missing: Mapping[str, str]) -> list[Board]:
    """The boards of all groups from the audits that are there."""
    return [_board(scaled, group, audits, missing) for group in scaled.groups]


def _board(scaled: Scaled, group: Group, audits: Mapping[str, AuditResult], missing: Mapping[str, str]) -> Board:
    column, undefended, standings, absent = scaled.study.columns[0], None, list[Standing](), dict[str, str]()
    floors: Mapping[Question, Leak] = {}
    for row in scaled.study.rows:
        if row.only and group.name not in row.only:
            continue
        names = [scaled.cell_name(group, row, column, seed) for seed in scaled.seeds]
        done = [audits[name] for name in names if name in audits]
        if len(done) < len(names):
            absent[row.name] = next((missing[name] for name in names if name in missing), "not run yet")
            continue
        chain = scaled.experiment(group, row, column, scaled.seeds[0]).chain
        if not chain.defenses:
            undefended, floors = Standing(row.name, point_of(None, done)), floors_of(done)
        else:
            standings.append(Standing(row.name, point_of(Setting(row.name, chain), done)))
    ranked = sorted(standings, key=lambda each: (each.cost, each.leak, each.loss))
    return Board(group.name, undefended, floors, ranked, absent)


def table_of(board: Board) -> Table:
    """A board as a table, a line of its own before each class of cost."""
    rows: list[list[str]] = []
    lines: dict[int, str] = {}
    for each in ([board.undefended] if board.undefended else []) + list(board.standings):
        line = "no defense" if each is board.undefended else _class(each.cost)
        if line not in lines.values():
            lines[len(rows)] = line
        rows.append(_cells(each))
    notes = [
        "",
        "Sorted by what leaks by the worst question, above chance, among defenses that cost alike. Each number is what "
        "the strongest attacker of the suite gets for its question, whether it knows the defense or not, ± half the "
        "95 % interval.",
    ]
    if board.floors:
        told = ", ".join(f"{HEADS[q]} {leak.found.mean:.2f}" for q, leak in board.floors.items())
        notes.append(f"Without any update: {told}.")
    if board.missing:
        notes.append(f"{len(board.missing)} of {len(board.missing) + len(rows)} rows are not there:")
        notes += [f"{', '.join(names)}: {why}." for why, names in _by_reason(board.missing).items()]
    heads = ["defense", "accuracy", "lost", *HEADS.values(), "time", "formal guarantee"]
    return Table(board.name, heads, rows, 1, notes, lines)


def _cells(each: Standing) -> list[str]:
    point = each.point
    leaks = [point.leaked(question) for question in QUESTIONS]
    return [
        each.row,
        f"{100 * point.utility.mean:.1f} %",
        "–" if point.loss is None else _spread(point.loss, -100, 1),
        *("–" if leak is None else f"{_spread(leak.found, 1, 2)}" for leak in leaks),
        "–" if point.slowdown is None else f"× {point.slowdown:.2g}",
        "none" if not point.formal else point.guarantee,
    ]


def _spread(found: Estimate, factor: float, digits: int) -> str:
    half = abs(factor) * (found.high - found.low) / 2
    mean = factor * found.mean + 0.0  # no minus before a zero
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def _class(cost: int) -> str:
    if cost == len(COSTS):
        return f"costs more than {100 * COSTS[-1]:g} points of accuracy"
    return f"costs at most {100 * COSTS[cost]:g} {'point' if COSTS[cost] == 0.01 else 'points'} of accuracy"


def _above(question: Question, leak: Leak) -> float:
    return max(2 * leak.found.mean - 1, 0.0) if question == "member" else leak.found.mean


def _by_reason(missing: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row, why in missing.items():
        found.setdefault(why, []).append(row)
    return found
