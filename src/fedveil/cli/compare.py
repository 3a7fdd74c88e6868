"""`fedveil compare`: defenses over their strengths on one task."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.cli.grid import Asked, Counter, with_audit_settings
from fedveil.cli.options import DEFENSE, RUN, names_of
from fedveil.errors import FedveilError

if TYPE_CHECKING:
    from fedveil.cli.config import Config
    from fedveil.study.compare import CompareResult

PAGE = "frontier.html"
STRENGTHS, SEEDS = 5, 1
# Attacks that take about a minute, all of them at every point: what one point leaves out cannot be compared.
DEFAULTS: dict[str, Any] = {"suite": "quick", "audit.stop_when_settled": False}

EXTRAS = [
    (
        "defenses",
        None,
        Annotated[
            str | None,
            typer.Option(
                "--defenses",
                metavar="SPECS",
                help="Names with commas between them, chains joined by +, fields as in --defense; or all.",
                show_default="all",
                rich_help_panel=DEFENSE,
                autocompletion=names_of("defenses"),
            ),
        ],
    ),
    (
        "strengths",
        None,
        Annotated[
            int | None,
            typer.Option(
                "--strengths",
                metavar="NUMBER",
                help="Points for each defense, from weak to strong.",
                show_default=str(STRENGTHS),
                rich_help_panel=DEFENSE,
            ),
        ],
    ),
    (
        "seeds",
        None,
        Annotated[
            str | None,
            typer.Option(
                "--seeds",
                metavar="N|N,N",
                help="How many runs of each, or which seeds: 3, or 0,7.",
                show_default=str(SEEDS),
                rich_help_panel=RUN,
            ),
        ],
    ),
]


@with_audit_settings("compare", EXTRAS)
def compare(asked: Asked) -> int | None:
    """Set what leaks against what it costs: defenses over their strengths, on one task."""
    from fedveil.cli.folder import own_folder
    from fedveil.study.comparison import FILE

    config, own = asked.config("compare", DEFAULTS), asked.section("compare")
    data, model = (str(getattr(config.task, name)).partition(":")[0].rpartition("/")[2] for name in ("data", "model"))
    if config.out is not None and (config.out / FILE).exists() and not config.overwrite:
        raise FedveilError(
            f"{config.out} holds a finished comparison: choose another --out or add --overwrite (what was computed "
            "stays in the store)"
        )
    with own_folder(config.out, f"compare-{data}-{model}", FILE) as folder:
        return _run(config, own, folder, asked.command)


def _run(config: Config, own: dict[str, Any], folder: Path, command: str) -> int:
    from fedveil.cli.display import Display
    from fedveil.cli.stores import store_of
    from fedveil.progress import is_terminal
    from fedveil.study.compare import compared, planned
    from fedveil.study.rooms import IndexedStore

    display = Display(quiet=config.quiet)
    strengths = STRENGTHS if own["strengths"] is None else own["strengths"]
    if not isinstance(strengths, int) or strengths < 1:
        raise FedveilError(f"--strengths must be 1 or more (got {strengths})")
    store, seeds = IndexedStore(store_of(config.store).folder), seeds_of(own["seeds"])
    with display.running(lambda: command), config.pool() as pool:
        plan = planned(config, own["defenses"] or "all", strengths, seeds, store, command)
        if not config.quiet:
            told = "".join(f"left out: {name} ({why})\n" for name, why in plan.left_out.items())
            print(f"{told}{plan.estimates.told}", file=sys.stderr, flush=True)
        shown = is_terminal(sys.stderr) and not config.quiet and not pool.forced
        result = compared(plan, store, pool, display.watch() if shown else None, Counter(plan.seconds, config.quiet))
        page = save(result, folder)
    if config.as_json:
        found = result.comparison.model_dump(mode="json", exclude={"undefended", "points"})
        print(json.dumps({**found, "records": result.comparison.records(), "out": str(folder)}, indent=1))
        return 0
    from fedveil.study.advice import advice

    print(result)
    print("", *advice(result.comparison), *result.comparison.warnings, "", f"The page is {page}", sep="\n")
    return 0


def save(result: CompareResult, folder: Path) -> Path:
    """Write the page and the tables, and last what says that it is finished."""
    from fedveil.files import write_atomically

    page = result.report(folder / PAGE)
    result.csv(folder / "table.csv")
    write_atomically(folder / "table.md", result.markdown().encode())
    write_atomically(folder / "table.tex", result.latex().encode())
    result.save(folder)
    return page


def seeds_of(given: str | int | Sequence[int] | None) -> list[int]:
    """The seeds that are meant: how many, or which.

    >>> seeds_of("3"), seeds_of("0,7"), seeds_of(None)
    ([0, 1, 2], [0, 7], [0])
    """
    if isinstance(given, list):
        parts = [str(each) for each in given]
    else:
        parts = [part.strip() for part in str(SEEDS if given is None else given).split(",")]
    none = parts == ["0"] and not isinstance(given, list)
    if none or not all(part.isdecimal() for part in parts):
        raise FedveilError(f"--seeds must be how many (3) or which (0,7), not '{given}'")
    numbers = [int(part) for part in parts]
    return list(range(numbers[0])) if len(numbers) == 1 and not isinstance(given, list) else numbers
