"""`fedveil tune`: the setting that leaks least within a cost, or costs least within a leak."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.cli.compare import DEFAULTS, seeds_of
from fedveil.cli.grid import Asked, with_audit_settings
from fedveil.cli.options import DEFENSE, RUN, names_of
from fedveil.errors import FedveilError

if TYPE_CHECKING:
    from fedveil.cli.config import Config
    from fedveil.study.tuning import Limit, Tuned

FILE = "tuned.json"
TRIALS, CONFIRM = 20, 2


def _option(kind: Any, flag: str, metavar: str, words: str, shown: str, panel: str, **more: Any) -> Any:
    found = typer.Option(flag, metavar=metavar, help=words, show_default=shown or False, rich_help_panel=panel, **more)
    return Annotated[kind, found]


EXTRAS = [
    (
        "defenses",
        None,
        _option(
            str | None,
            "--defenses",
            "SPECS",
            "Names with commas between them, chains joined by +; fields may be ranges: sigma=1e-3..1e-1.",
            "gradient-dropout,fedem,gaussian-noise",
            DEFENSE,
            autocompletion=names_of("defenses"),
        ),
    ),
    (
        "max_accuracy_loss",
        None,
        _option(str | None, "--max-accuracy-loss", "SHARE", "Points of utility that may be lost: 1%.", "", DEFENSE),
    ),
    (
        "max_identified",
        None,
        _option(str | None, "--max-identified", "SHARE", "Share that may be identified: 5%.", "", DEFENSE),
    ),
    ("by", None, _option(str | None, "--by", "QUESTION", "reconstruct, link or member.", "reconstruct", DEFENSE)),
    ("trials", None, _option(int | None, "--trials", "NUMBER", "Settings to try.", str(TRIALS), RUN)),
    ("seeds", None, _option(str | None, "--seeds", "N|N,N", "Runs of each, or which seeds.", "1", RUN)),
    (
        "confirm",
        None,
        _option(int | None, "--confirm", "NUMBER", "Fresh seeds on which the choice is tried.", str(CONFIRM), RUN),
    ),
]


@with_audit_settings("tune", EXTRAS)
def tune(asked: Asked) -> int | None:
    """Find the setting that leaks least within a cost, or costs least within a leak."""
    from fedveil.cli.folder import own_folder

    config, own = asked.config("tune", DEFAULTS), asked.section("tune")
    limit = _limit(own)
    if config.out is not None and (config.out / FILE).exists() and not config.overwrite:
        raise FedveilError(f"{config.out} holds a finished tuning: choose another --out or add --overwrite")
    with own_folder(config.out, "tune", FILE) as folder:
        return _run(config, own, limit, folder, asked.command)


def _run(config: Config, own: dict[str, Any], limit: Limit, folder: Path, command: str) -> int:
    from fedveil.cli.display import Display
    from fedveil.cli.stores import store_of
    from fedveil.files import write_atomically
    from fedveil.progress import is_terminal
    from fedveil.study.rooms import IndexedStore
    from fedveil.study.space import Space
    from fedveil.study.strengths import families
    from fedveil.study.tuning import Search

    question: Any = own["by"] or "reconstruct"
    if question not in ("reconstruct", "link", "member"):
        raise FedveilError(f"--by must be reconstruct, link or member (got '{question}')")
    trials, confirm = own["trials"] or TRIALS, CONFIRM if own["confirm"] is None else own["confirm"]
    if not isinstance(trials, int) or not isinstance(confirm, int) or trials < 1 or confirm < 0:
        raise FedveilError(f"--trials must be 1 or more and --confirm 0 or more (got {trials} and {confirm})")
    spaces = [Space.of(each) for each in families(own["defenses"] or "gradient-dropout,fedem,gaussian-noise")]

    def tell(line: str) -> None:
        if not config.quiet:
            print(line, file=sys.stderr, flush=True)

    display = Display(quiet=config.quiet)
    with display.running(lambda: command), config.pool() as pool:
        watch = display.watch() if is_terminal(sys.stderr) and not config.quiet else None
        store = IndexedStore(store_of(config.store).folder)
        seeds = seeds_of(own["seeds"])
        search = Search(config, spaces, limit, question, seeds, store, pool, watch, command, tell)
        tell(f"{trials} trials on {len(seeds)} seed(s): {limit.words}; stopped, the same command goes on")
        tuned = search.run(trials, confirm)
        write_atomically(folder / "trials.md", evidence(tuned).encode())
        if tuned.config:
            write_atomically(folder / "recommended.toml", tuned.config.encode())
        write_atomically(folder / FILE, tuned.model_dump_json(indent=1).encode())
    if config.as_json:
        print(json.dumps({**tuned.model_dump(mode="json"), "out": str(folder)}, indent=1))
        return 0
    print(evidence(tuned), *tuned.words, sep="\n")
    if tuned.config:
        print(f"fedveil audit --config {folder / 'recommended.toml'}")
    return 0


def evidence(tuned: Tuned) -> str:
    """All that was tried, as a table in Markdown; the least leakage first."""
    from fedveil.study.tables import Table, as_markdown
    from fedveil.tasks.measures import measure

    def leak(point: Any) -> float:
        return float(point.leaked(tuned.question).found.mean)

    done = sorted((each for each in tuned.trials if each.point is not None), key=lambda each: leak(each.point))
    rows = []
    for each in done:
        point = each.point
        assert point is not None
        lost = "" if point.loss is None else measure(tuned.utility).change(point.loss.mean)
        shown = measure(tuned.utility).shown(point.utility.mean)
        rows.append([each.defense, each.state, f"{leak(point):.3f}", shown, lost])
    rows += [[each.defense, "pruned", each.why, "", ""] for each in tuned.trials if each.state == "pruned"]
    return as_markdown(
        Table("", ["defense", "limit", f"leaks ({tuned.question})", tuned.utility, "change"], rows, words=2)
    )


def _limit(own: dict[str, Any]) -> Limit:
    from fedveil.study.tuning import Limit

    given = {"loss": own["max_accuracy_loss"], "leak": own["max_identified"]}
    named = {kind: value for kind, value in given.items() if value is not None}
    if len(named) != 1:
        raise FedveilError("name one limit: --max-accuracy-loss 1% or --max-identified 5%")
    ((kind, value),) = named.items()
    return Limit(kind, share_of(str(value)))  # type: ignore[arg-type]


def share_of(text: str) -> float:
    """A share, in percent or as a fraction.

    >>> share_of("1%"), share_of("2.5 %"), share_of("0.05")
    (0.01, 0.025, 0.05)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= value <= 1:
        raise FedveilError(f"a limit is a share, as 1% or 0.01 (got '{text}')")
    return value
