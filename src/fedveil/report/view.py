"""What the page shows, worked out from a result: the template only lays it out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from fedveil.auditing.result import AttackRun, Cost, Estimate, Question, Result, Row
from fedveil.auditing.roles import ROLES, Role, RoleWords, wording
from fedveil.auditing.table import formal_bound
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.modalities import modality
from fedveil.leakage.modality import Words
from fedveil.report import formatting
from fedveil.report.charts import Axis, Series, interval_bar, line_chart
from fedveil.tasks.measures import measure

SMALL_SAMPLE = 30
MOST_COLUMNS = 7  # of the table of numbers: more are cut off on a laptop and on paper
# A chart is drawn for a wide and for a narrow page, so that its text is readable on both.
WIDTHS = {"wide": 720.0, "narrow": 350.0}


@dataclass(frozen=True)
class Column:
    """A metric in the table of numbers."""

    name: str
    title: str
    unit: str
    private: str
    words: str
    share: bool
    digits: int

    def mean(self, estimate: Estimate) -> str:
        """The mean as it stands in the table."""
        return formatting.number(estimate.mean * (100 if self.share else 1), self.digits)

    def interval(self, estimate: Estimate) -> str:
        """The interval below the mean."""
        return formatting.interval(estimate, 100 if self.share else 1, self.digits)


@dataclass(frozen=True)
class Table:
    """The numbers: rows from what could leak to what cannot be beaten, columns in parts that fit the page."""

    parts: list[list[Column]]
    rows: list[Row]
    by_round: bool  # whether some rows are of one round
    threats: bool  # whether it is known what each attacker has
    smallest: int | None  # the smallest number of images behind a row, if that is small

    @property
    def columns(self) -> list[Column]:
        """All metrics."""
        return [column for part in self.parts for column in part]


def words(result: Result) -> Mapping[Role, RoleWords]:
    """What the roles of a result are called."""
    return wording((row.role for row in result.rows), modality(result.modality).words)


def lead(result: Result, question: Question = "reconstruct") -> Row | None:
    """The attacker that a question's answer is about, over all attacked rounds."""
    answer = result.verdict.answer(question)
    named = result.row(answer.role, answer.attack, question=question) if answer and answer.role else None
    return named or strongest(result, question)


def strongest(result: Result, question: Question) -> Row | None:
    """The strongest attacker with one attack: the marked one, if there is a mark."""
    marked = [row for row in result.rows if row.strongest and row.question == question]
    roles: tuple[Role, ...] = ("adaptive", "naive", "ceiling")
    others = (result.row(role, question=question) for role in roles)
    return next((row for row in (*marked, *others) if row is not None), None)


def shown_roles(result: Result, question: Question = "reconstruct") -> list[Role]:
    """Who is shown side by side: from no defense to the floor.

    Without a defense nobody knows one, and beside captured updates there may be no undefended ones.
    """
    tried = {row.role for row in result.rows if row.question == question}
    roles: list[Role] = ["ceiling", "naive", "adaptive"]
    if result.defense.name == "none" or "ceiling" not in tried:
        roles = [role for role in roles if role in tried]
    return [*roles, floor(result, question)]


def beside(result: Result, first: Row | None, role: Role, number: int | None = None) -> Row | None:
    """The row of a role to set beside an attacker, by the same attack for a fair comparison; of a round, if named."""
    question = first.question if first else "reconstruct"
    rows = [row for row in result.rows if (row.role, row.round, row.question) == (role, number, question)]
    same = [row for row in rows if first is not None and row.attack == first.attack]
    return next(iter((*same, *rows)), None)


def floor(result: Result, question: Question = "reconstruct") -> Role:
    """The floor that a question was judged against."""
    answer = result.verdict.answer(question)
    return answer.floor if answer and answer.floor else "noise-floor"


@dataclass(frozen=True)
class Link:
    """A line on those who link updates: how many of them, and how many any attacker at all could."""

    row: Row
    who: str
    of: str  # "15 of 16"
    share: str
    exact: str
    allowed: str
    bar: Markup


def links(result: Result) -> list[Link]:
    """Who linked how many updates to what is behind them: over all rounds first, then round by round."""
    chance = 1 / result.candidates if result.candidates > 0 else None
    found = []
    for row in _in_order([row for row in result.rows if row.question == "link"]):
        estimate = next(iter(row.metrics.values()), None)
        found.append(
            Link(
                row=row,
                who=words(result)[row.role].who,
                of=_of(estimate),
                share=formatting.percent(estimate),
                exact={True: "exact likelihood", False: "similarity", None: formatting.NONE}[row.exact],
                allowed=formal_bound(row),
                bar=interval_bar(estimate, row.role, chance, row.bound),
            )
        )
    return found


def _of(share: Estimate | None) -> str:
    if share is None or not math.isfinite(share.mean):
        return formatting.NONE
    return f"{share.mean * share.count:,.0f} of {share.count:,}"


def _in_order(rows: list[Row]) -> list[Row]:
    roles = list(ROLES)
    return sorted(rows, key=lambda row: (row.round or 0, roles.index(row.role)))


def table(result: Result) -> Table:
    """The numbers of all who reconstruct, and of the floors: over all rounds first, then round by round."""
    rows = _in_order([row for row in result.rows if row.question == "reconstruct"])
    present = {name for row in rows for name in row.metrics}
    names = [name for name in METRICS if name in present] + sorted(present - METRICS.keys())
    columns = [_column(name) for name in names]
    smallest = min((one.count for row in rows for one in row.metrics.values()), default=SMALL_SAMPLE)
    return Table(
        parts=_in_parts(columns, MOST_COLUMNS - 2 if any(row.threat for row in rows) else MOST_COLUMNS),
        rows=rows,
        by_round=any(row.round is not None for row in rows),
        threats=any(row.threat for row in result.rows),
        smallest=smallest if smallest < SMALL_SAMPLE else None,
    )


def _in_parts(columns: list[Column], first: int) -> list[list[Column]]:
    """Columns in parts that fit the page; the first part may have to leave room for something else."""
    rest = columns[first:]
    parts = [columns[:first], *(rest[start : start + MOST_COLUMNS] for start in range(0, len(rest), MOST_COLUMNS))]
    return [part for part in parts if part]


def _column(name: str) -> Column:
    known = formatting.metric(name)
    share = formatting.is_share(name)
    unit = "%" if share else known.unit if known else ""
    private = f"{known.arrow} private" if known else ""
    title, explained, digits = (known.title, known.words, known.digits) if known else (name, "", 3)
    return Column(name, title, unit, private, explained, share, digits)


def cost_charts(cost: Cost) -> dict[str, Markup]:
    """Utility per round with and without the defense; the last round with its interval. Empty without a history."""
    if not cost.history:
        return {}
    rounds, kind = [float(one.round) for one in cost.history], measure(cost.metric)

    def series(label: str, values: list[float | None], final: Estimate | None, style: str) -> Series:
        y = [math.nan if value is None else value for value in values]
        low, high = [math.nan] * len(y), [math.nan] * len(y)
        if final is not None:
            low[-1], high[-1] = final.low, final.high
        return Series(label, rounds, y, low, high, style)

    lines = [
        series("no defense", [one.undefended for one in cost.history], cost.undefended, "ceiling"),
        series("with the defense", [one.defended for one in cost.history], cost.defended, "adaptive"),
    ]
    return {
        name: line_chart(
            lines,
            x=Axis("Round", whole=True),
            y=Axis(f"Test {cost.metric} ({'↓' if kind.lower_is_better else '↑'} more useful)", percent=kind.share),
            title=f"Test {cost.metric} per round, with and without the defense",
            width=width,
        )
        for name, width in WIDTHS.items()
    }


def attack_charts(run: AttackRun, data: Words) -> dict[str, Markup]:
    """Matching cost against steps for every attacker of a run. Empty without curves."""
    if not run.curves:
        return {}
    called = wording((curve.role for curve in run.curves), data)
    lines = [
        Series(called[curve.role].label, curve.steps, curve.median, curve.low, curve.high, curve.role)
        for curve in run.curves
    ]
    return {
        name: line_chart(
            lines,
            x=Axis("Step of the attack", whole=True),
            y=Axis("Matching cost, ↑ more private", log=True),
            title=f"Matching cost of {run.attack} against its steps: median and quartiles",
            width=width,
        )
        for name, width in WIDTHS.items()
    }


def attack_facts(run: AttackRun, *, known: bool = True) -> list[tuple[str, str]]:
    """How an attack was run: what it has no such thing of is left out, as are labels where the truth is not known."""
    found = [] if run.question == "member" else [("victims", f"{run.victims:,}")]
    found += [] if run.question == "member" else [("examples per update", f"{run.batch_size:,}")]
    found += [("steps", f"{run.steps:,}")] if run.steps is not None else []
    found += [("restarts", f"{run.restarts:,}")] if run.restarts is not None else []
    found.append(("time taken", formatting.duration(run.seconds)))
    if run.question == "reconstruct" and known:
        read = formatting.percent(run.label_recovery) if run.label_recovery else "labels were given"
        found.append(("labels read off rightly", read))
    return found


@dataclass(frozen=True)
class Way:
    """A metric on the way of an attack: its value after parts of the steps, role by role."""

    title: str
    marks: list[str]
    lines: list[tuple[str, list[str]]]


def on_the_way(run: AttackRun, data: Words) -> list[Way]:
    """What was measured while an attack ran."""
    found, called = [], wording(run.on_the_way, data)
    for name in dict.fromkeys(name for each in run.on_the_way.values() for name in each):
        noted = {role: each[name] for role, each in run.on_the_way.items() if name in each}
        marks = list(dict.fromkeys(mark for each in noted.values() for mark in each))
        lines = [(called[role].who, [_marked(each.get(mark), name) for mark in marks]) for role, each in noted.items()]
        found.append(Way(METRICS[name].title if name in METRICS else name, marks, lines))
    return found


def _marked(estimate: Estimate | None, name: str) -> str:
    if estimate is None:
        return formatting.NONE
    column = _column(name)
    return f"{column.mean(estimate)} {column.interval(estimate)}"


def cost_rows(cost: Cost) -> Iterator[tuple[str, str, str, str]]:
    """The table of costs: what, without the defense, with it, difference."""
    if cost.defended or cost.undefended:
        lower = " (lower is better)" if measure(cost.metric).lower_is_better else ""
        yield (
            f"Test {cost.metric}{lower}",
            formatting.utility(cost.undefended, cost.metric),
            formatting.utility(cost.defended, cost.metric),
            formatting.utility_change(cost.difference, cost.metric),
        )
    if cost.majority is not None:
        blind = formatting.measured(cost.majority, cost.metric)
        yield f"The same, {measure(cost.metric).without_model}", blind, blind, formatting.NONE
    for name, values in cost.others.items():
        without, with_it = (formatting.measured(values.get(which), name) for which in ("undefended", "defended"))
        yield f"Test {name}", without, with_it, formatting.NONE
    for name, values in cost.beside.items():
        without, with_it = (formatting.measured(values.get(which), cost.metric) for which in ("undefended", "defended"))
        yield f"Test {cost.metric} of {name}, not of the federation's model", without, with_it, formatting.NONE
    last = cost.history[-1] if cost.history else None
    for part, where in (("validation", "validation examples"), ("train", "a sample of the training examples")):
        values = getattr(last, part) if last is not None else {}
        if values:
            without, with_it = (
                formatting.measured(values.get(which), cost.metric) for which in ("undefended", "defended")
            )
            yield f"After the last round, {cost.metric} on {where}", without, with_it, formatting.NONE
    if cost.seconds_per_round or cost.slowdown is not None:
        times = cost.seconds_per_round
        ratio = f"{formatting.number(cost.slowdown)} times as long" if cost.slowdown is not None else formatting.NONE
        between = cost.slowdown_interval
        if between is not None:
            noise = ", within noise" if between.low <= 1 <= between.high else ""
            ratio += f" {formatting.between(between.low, between.high)}{noise}"
        yield (
            "Time of a round",
            formatting.duration(times.get("undefended")),
            formatting.duration(times.get("defended")),
            ratio,
        )
