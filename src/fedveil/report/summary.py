"""The first page: all that a reader needs who stops there."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from fedveil.auditing.result import DefenseCard, Result, Role
from fedveil.report import words
from fedveil.report.charts import interval_bar
from fedveil.report.view import Grid, beside


@dataclass(frozen=True)
class Bar:
    """A line of the strip on the first screen: who picks the right image how often."""

    role: Role
    who: str
    share: str
    bar: Markup


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
    strip: list[Bar]
    chance: str
    pictures: list[Shown]
    pictured: str  # which image it is
    ran: list[tuple[str, str]]


def summary(result: Result, grid: Grid) -> Summary:
    """The first page of a result."""
    among = result.identified_among
    return Summary(
        defense=defenses(result.defense),
        attacked=result.attacked or _attacked(result),
        strip=strip(result),
        chance=f"{words.number(100 / among, 0 if among <= 100 else 2)}{words.SPACE}%" if among > 0 else words.NONE,
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
        return [(card.name, ", ".join(f"{name} {value}" for name, value in words.settings(card.settings)))]
    found = []
    for name in dict.fromkeys(names):
        own = {k.removeprefix(f"{name}."): v for k, v in card.settings.items() if k.startswith(f"{name}.")}
        found.append((name, ", ".join(f"{key} {value}" for key, value in words.settings(own))))
    return found


def strip(result: Result) -> list[Bar]:
    """Who picks the right image how often, from no defense to a guess without the update."""
    verdict = result.verdict
    roles: list[Role] = ["ceiling", "naive", "adaptive", verdict.floor]
    if result.defense.name == "none":
        roles = ["ceiling", verdict.floor]
    chance = 1 / result.identified_among if result.identified_among > 0 else None
    bars = []
    for role in roles:
        row = beside(result, role, verdict.round)
        if role == "adaptive" and result.defense.uninformed:
            row = None  # its rows hold an attacker who knew nothing more
        estimate = row.metrics.get(verdict.measure) if row else None
        share = "not tried" if row is None else "not measured" if estimate is None else words.percent(estimate)
        bars.append(Bar(role, words.PLAIN[role], share, interval_bar(estimate, role, chance)))
    return bars


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
    shown = [Shown("Original", first.picture, f"{first.name}, original")]
    for role, cell in zip(grid.columns, first.cells, strict=True):
        if not (role == "adaptive" and result.defense.uninformed):
            shown.append(Shown(words.PLAIN[role], cell.picture, f"{first.name}, {words.PLAIN[role].lower()}"))
    return shown[:4]


def _pictured(grid: Grid) -> str:
    if not grid.cases:
        return ""
    first = grid.cases[0]
    what = f"{first.name}{f' ({first.label})' if first.label else ''}"
    return f"{what}, the one that leaks most of {grid.total}." if grid.total > 1 else f"{what}."


def _ran(result: Result) -> list[tuple[str, str]]:
    """Who ran what: enough to find the run again."""
    made = result.provenance
    found = [
        ("run", words.moment(made.started)),
        ("with", f"fedveil {made.versions.get('fedveil', 'of unknown version')}"),
        ("took", words.duration(made.seconds)),
        ("seed", str(made.seed)),
        ("machine", made.machine),
        ("attacks", ", ".join(run.attack for run in result.attacks) or words.NONE),
    ]
    return found + [(f"SHA-256 of the {name}", f"{value[:12]}…") for name, value in made.hashes.items()]
