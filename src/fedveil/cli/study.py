"""`fedveil study`: the tables of papers, run, looked at and written out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedveil.cli.grid import Counter
from fedveil.errors import FedveilError

if TYPE_CHECKING:
    from fedveil.study.figures import Drawing
    from fedveil.study.outcome import Outcome
    from fedveil.study.rooms import IndexedStore
    from fedveil.study.studying import StudyPlan

app = typer.Typer(help="The papers' tables: our numbers beside the published ones.")
FORMATS = {"md": "Markdown", "csv": "CSV", "tex": "LaTeX", "html": "HTML"}

_Name = Annotated[str, typer.Argument(metavar="STUDY", help="PAPER/TABLE of `fedveil study list`, or a TOML file.")]
_Scale = Annotated[
    str,
    typer.Option("--scale", metavar="TEXT", help="paper, desk (cut for two cores) or smoke (seconds, no data sets)."),
]
_Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="FOLDER", help="The store.", show_default="FEDVEIL_STORE or fedveil-out/store"),
]


_Add = Annotated[
    Path | None,
    typer.Option("--add", metavar="FILE.py", help="A Python file that registers a defense of your own."),
]


@app.command("list")
def _list() -> None:
    """Show every study with its title."""
    from fedveil.study.definition import Study
    from fedveil.study.studying import list_studies

    found = list_studies()
    if not found:
        raise FedveilError("there is no folder `studies` here or above")
    width = max(len(name) for name, _ in found)
    for name, path in found:
        print(f"{name:<{width}}  {Study.read(path).title}")


@app.command("run")
def _run(
    name: _Name,
    scale: _Scale = "desk",
    store: _Store = None,
    workers: Annotated[str, typer.Option(metavar="TEXT", help="Processes that make whole audits.")] = "auto",
    add: _Add = None,
    on: Annotated[str | None, typer.Option("--on", metavar="TEXT", help="ray, or ray://HOST:PORT.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show progress.")] = False,
) -> None:
    """Run a study, from where it stopped if it did; tell the plan first."""
    from fedveil.cli.display import Display
    from fedveil.cli.live_table import live
    from fedveil.study.studying import run_study
    from fedveil.workers import Workers

    if add is not None:
        _added(add, alone=on is None and workers in ("auto", "1"))
    command = f"fedveil study run {name} --scale {scale}" + (f" --store {store}" if store else "")
    pool = Workers.of(workers)
    with Display(quiet=quiet).running(lambda: command), pool:
        kept, plan = _planned(name, scale, store, command)
        if not quiet:
            told = [f"Scale: {scale}.", *(f"  cut: {cut}" for cut in plan.scaled.cuts())]
            if plan.scaled.study.hours:
                told.append(f"Budget: {plan.scaled.study.hours:g} hours on two cores.")
            told += [f"  left empty: {cell} ({why})" for cell, why in plan.missing.items()]
            print(*told, plan.estimates.told, sep="\n", file=sys.stderr, flush=True)
        counter = Counter(plan.seconds, quiet)
        table = live(plan, kept, counter, quiet=quiet)
        try:
            if on is not None:
                from fedveil.study.on_ray import run_on_ray

                run_on_ray(plan.grid, kept, on, table or counter)
            outcome = run_study(plan, kept, pool, done=None if on is not None else table or counter)
        finally:
            if table is not None:
                table.clear()
    _show(outcome, plan, kept)


@app.command("status")
def _status(name: _Name, scale: _Scale = "desk", store: _Store = None) -> None:
    """Show which audits of a study are done, running or failed, and what is left."""
    kept, plan = _planned(name, scale, store, "")
    states = kept.index.cells(plan.grid.study)
    for cell in plan.grid.cells:
        state = states.get(cell.name)
        told = "to do" if state is None else state.state
        print(f"{told:<8} {cell.name}" + (f" ({state.note})" if state is not None and state.note else ""))
    for cell_name, why in plan.missing.items():
        print(f"{'empty':<8} {cell_name} ({why})")
    print(plan.estimates.told)


@app.command("show")
def _show_command(name: _Name, scale: _Scale = "desk", store: _Store = None, add: _Add = None) -> None:
    """Show the table of what is done so far; nothing is computed."""
    from fedveil.study.studying import gathered

    _added(add)
    kept, plan = _planned(name, scale, store, "")
    _show(gathered(plan, kept), plan, kept)


@app.command("export")
def _export(
    name: _Name,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="FILE.md, .csv, .tex or .html.")],
    scale: _Scale = "desk",
    store: _Store = None,
    add: _Add = None,
) -> None:
    """Write the table of what is done so far as Markdown, CSV, LaTeX or HTML."""
    from fedveil.files import writable_folder, write_atomically
    from fedveil.study.studying import illustrated

    form = out.suffix.removeprefix(".")
    if form not in FORMATS:
        raise FedveilError(f"--out must end with {', '.join(f'.{each}' for each in FORMATS)} (got '{out.name}')")
    _added(add)
    kept, plan = _planned(name, scale, store, "")
    if plan.scaled.study.every and form in ("md", "html"):
        from fedveil.report.leaderboard_page import leaderboard_markdown, render_leaderboard
        from fedveil.study.studying import ranked

        made = (leaderboard_markdown if form == "md" else render_leaderboard)(plan.scaled, ranked(plan, kept))
    else:
        made = exported(*illustrated(plan, kept), form)  # type: ignore[arg-type]
    writable_folder(out.parent)
    write_atomically(out, made.encode())
    print(out)


def exported(outcome: Outcome, drawings: Sequence[Drawing], form: Literal["md", "csv", "tex", "html"]) -> str:
    """The table and what it says in one of the formats."""
    from fedveil.study.summary import summary
    from fedveil.study.tables import as_csv, as_latex, as_markdown

    if form == "html":
        from fedveil.report.study_page import render_study

        return render_study(outcome, drawings)
    if form == "csv":
        return as_csv(outcome.records())
    if form == "tex":
        return as_latex(outcome.table())
    return as_markdown(outcome.table()) + "\n" + "".join(f"- {sentence}\n" for sentence in summary(outcome))


def _planned(name: str, scale: str, store: Path | None, command: str) -> tuple[IndexedStore, StudyPlan]:
    from fedveil.cli.stores import store_of
    from fedveil.study.rooms import IndexedStore
    from fedveil.study.studying import find_study, plan_study

    kept = IndexedStore(store_of(store).folder)
    return kept, plan_study(find_study(name), scale, kept, command)


def _added(path: Path | None, *, alone: bool = True) -> None:
    """Register what a Python file registers: it is run, as the user asks."""
    if path is None:
        return
    if not alone:
        raise FedveilError("--add works in one process: leave out --workers and --on, or install the file as a package")
    from fedveil.study.added import add_file

    add_file(path)


def _show(outcome: Outcome, plan: StudyPlan, store: IndexedStore) -> None:
    from fedveil.study.summary import summary
    from fedveil.study.tables import as_text

    if plan.scaled.study.every:
        from fedveil.study.leaderboard import table_of
        from fedveil.study.studying import ranked

        print(*(as_text(table_of(board)) for board in ranked(plan, store)), sep="\n\n")
        return
    print(as_text(outcome.table()), "", *summary(outcome), sep="\n")
