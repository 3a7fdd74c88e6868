"""The first page: all that a reader needs who stops there."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from fedveil.auditing.result import Answer, DefenseCard, Question, Result, measures
from fedveil.auditing.roles import Role
from fedveil.auditing.table import rounded_up
from fedveil.leakage.membership import AUC, CHANCE
from fedveil.leakage.modalities import modality
from fedveil.report import formatting
from fedveil.report.charts import interval_bar
from fedveil.report.grid import Grid
from fedveil.report.view import beside, lead, shown_roles, words


@dataclass(frozen=True)
class Bar:
    """A line of a strip on the first screen: who picks the right one how often."""

    role: Role
    who: str
    share: str
    bar: Markup


@dataclass(frozen=True)
class Strip:
    """Who gets how much, for one question."""

    title: str
    bars: list[Bar]
    note: str


@dataclass(frozen=True)
class Shown:
    """A picture with what it is."""

    title: str
    picture: str | None
    alt: str


@dataclass(frozen=True)
class Summary:
    """What stands on the first page beside the verdict."""

    defense: list[tuple[str, str]]  # each defense of a chain with all its settings
    attacked: str
    strips: list[Strip]
    pictures: list[Shown]
    pictured: str  # which image it is
    ran: list[tuple[str, str]]


def summary(result: Result, grid: Grid) -> Summary:
    """The first page of a result."""
    return Summary(
        defense=defenses(result.defense),
        attacked=result.attacked or _attacked(result),
        strips=strips(result),
        pictures=_pictures(result, grid),
        pictured=_pictured(grid),
        ran=_ran(result),
    )


def defenses(card: DefenseCard) -> list[tuple[str, str]]:
    """Each defense of a chain with all its settings, defaults too.

    >>> card = DefenseCard(name="a + b", settings={"a.x": 1, "b.y": True, "b.z": 0.5}, spelled="", summary="",
    ...     acts_on="", guarantee="", formal=False, weaknesses=[], paper="")
    >>> defenses(card)
    [('a', 'x 1'), ('b', 'y yes, z 0.5')]
    """
    names = card.name.split(" + ")
    if len(names) == 1:
        return [(card.name, ", ".join(f"{name} {value}" for name, value in formatting.settings(card.settings)))]
    found = []
    for name in dict.fromkeys(names):
        own = {k.removeprefix(f"{name}."): v for k, v in card.settings.items() if k.startswith(f"{name}.")}
        found.append((name, ", ".join(f"{key} {value}" for key, value in formatting.settings(own))))
    return found


def strips(result: Result) -> list[Strip]:
    """For each question that was asked, who gets how much: from no defense to a guess without the update."""
    one = modality(result.modality).words.one
    batches = any(run.batch_size > 1 for run in result.attacks)
    linked = f"Who links updates to the right {'batch' if batches else one}"
    titles: dict[Question, str] = {
        "reconstruct": f"Who picks the right {one}",
        "link": linked,
        "member": "Who tells members from others",
    }
    questions: tuple[Question, ...] = ("reconstruct", "link", "member")
    asked = [question for question in questions if any(row.question == question for row in result.rows)]
    asked = asked if result.candidates else []  # nothing to pick from
    return [Strip(titles[question], _bars(result, question), _note(result, question)) for question in asked]


def _bars(result: Result, question: Question) -> list[Bar]:
    answer, first = result.verdict.answer(question), lead(result, question)
    measure = answer.measure if answer and answer.measure else measures(question, modality(result.modality))[0]
    chance = 1 / result.candidates if result.candidates > 0 else None
    chance = CHANCE.get(measure, chance)
    bars = []
    for role in shown_roles(result, question):
        row = beside(result, first, role, answer.round if answer else None)
        if role == "adaptive" and result.defense.uninformed:
            row = None  # its rows hold an attacker who knew nothing more
        estimate = row.metrics.get(measure) if row else None
        share = "not tried" if row is None else "not measured" if estimate is None else formatting.percent(estimate)
        bar = interval_bar(estimate, role, chance, row.allowed(measure) if row else None)
        bars.append(Bar(role, words(result)[role].plain, share, bar))
    return bars


def _measure(answer: Answer | None) -> str:
    return answer.measure if answer and answer.measure else AUC


def _asked(answer: Answer | None) -> str:
    """What is counted of those who tell members from others."""
    measure = _measure(answer)
    if measure == AUC:
        return "Of pairs of a member and another"
    return f"Of the members, at {100 * CHANCE[measure]:g}{formatting.SPACE}% false alarms"


def _note(result: Result, question: Question) -> str:
    """How to read a strip."""
    answer, among = result.verdict.answer(question), result.candidates
    number = f", in round {answer.round}" if answer and answer.round else ""
    chance = formatting.number(100 / among, 0 if among <= 100 else 2) if among > 0 else formatting.NONE
    told = f"Out of {among}{number}"
    if question == "member":
        told, chance = f"{_asked(answer)}{number}", formatting.number(100 * CHANCE[_measure(answer)], 0)
    elif question == "link":
        told += ", by comparing updates"
    else:
        told += f", with the 95{formatting.SPACE}% interval"
    told += f"; the dashed line is chance ({chance}{formatting.SPACE}%)"
    if answer and answer.bound is not None:
        told += f", the solid one the most that the guarantee allows ({rounded_up(answer.bound)}{formatting.SPACE}%)"
    return f"{told}."


def _attacked(result: Result) -> str:
    """What was attacked, for results that did not keep the words."""
    run = next(iter(result.attacks), None)
    if run is None:
        return ""
    images = "one image" if run.batch_size == 1 else f"{run.batch_size} images"
    return f"{run.victims} update{'s' if run.victims != 1 else ''} of {images} each"


def _pictures(result: Result, grid: Grid) -> list[Shown]:
    """The most leaked image: as it is, and as attackers got it."""
    if not grid.cases:
        return []
    first = grid.cases[0]
    shown = [Shown("Original", first.picture, f"{first.name}, original")] if first.picture else []
    for role, cell in zip(grid.columns, first.cells, strict=True):
        if not (role == "adaptive" and result.defense.uninformed):
            called = words(result)[role].plain
            shown.append(Shown(called, cell.picture, f"{first.name}, {called.lower()}"))
    return shown[:4]


def _pictured(grid: Grid) -> str:
    if not grid.cases:
        return ""
    first = grid.cases[0]
    what = f"{first.name}{f' ({first.label})' if first.label else ''}"
    if first.picture is None:
        return f"{what} of {grid.total}; the original is not known."
    return f"{what}, the one that leaks most of {grid.total}." if grid.total > 1 else f"{what}."


def _attacks(result: Result) -> str:
    names = ", ".join(run.attack for run in result.attacks) or formatting.NONE
    return f"{names} (suite {result.suite})" if result.suite else names


def _ran(result: Result) -> list[tuple[str, str]]:
    """Who ran what: enough to find the run again."""
    made = result.provenance
    found = [
        ("run", formatting.moment(made.started)),
        ("with", f"fedveil {made.versions.get('fedveil', 'of unknown version')}"),
        ("took", formatting.duration(made.seconds)),
        ("seed", str(made.seed)),
        ("machine", made.machine),
        ("attacks", _attacks(result)),
    ]
    if result.auxiliary is not None:
        data = result.auxiliary
        found.append(("attackers learned from", f"{data.used:,} {data.part} of {data.source}"))
    return found + [(f"SHA-256 of the {name}", f"{value[:12]}…") for name, value in made.hashes.items()]
