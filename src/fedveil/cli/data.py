"""`fedveil data`: list data sets, download missing ones, check their files, and show how clients share them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import names_of, option, read_values
from fedveil.errors import FedveilError, unknown_name
from fedveil.registry import datasets
from fedveil.tasks.sources import SOURCES, Located, data_root, locate

if TYPE_CHECKING:
    from fedveil.tasks.fetch import Progress

EMBEDDED = ("breast-cancer", "digits")
WITHOUT_FILES = {
    **dict.fromkeys(EMBEDDED, "comes with scikit-learn"),
    "csv": "your own table: csv:path=FILE.csv,target=COLUMN",
    "image-folder": "your own pictures: image-folder:path=FOLDER",
}

app = typer.Typer(help="List, get and check data sets, and show how clients share them.")
Root = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        metavar="FOLDER",
        help="Folder of the data files.",
        show_default="FEDVEIL_DATA or ~/.cache/fedveil",
    ),
]
SETS = names_of("datasets")
Names = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="Data sets: see `fedveil data list`.", autocompletion=SETS)
]


@app.command("list")
def _list(
    root: Root = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show which data sets are there, which are missing, and where their files are or belong."""
    rows = [_row(name, root) for name in datasets.entries()]
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name'].ljust(width)}  {row['state'].ljust(8)}  {row['where']}")


@app.command("fetch")
def _fetch(
    names: Names, root: Root = None, quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False
) -> None:
    """Download data sets, each file checked against its published checksum. A stopped download continues."""
    from fedveil.tasks.fetch import fetch

    for name in names:
        _check_name(name)
    for name in names:
        if name not in SOURCES:
            print(f"{name}: nothing to download: {WITHOUT_FILES.get(name, 'it defines itself where its files are')}")
            continue
        with _bar(quiet) as progress:
            came = fetch(name, SOURCES[name], root, progress)
        there = locate(SOURCES[name], root)
        done = f"{len(came)} file{'s' * (len(came) > 1)}" if came else "was there already,"
        print(f"{name}: {done} in {there.folder}")


@app.command("check")
def _check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Data sets; by default all that are there.", autocompletion=SETS),
    ] = None,
    root: Root = None,
) -> None:
    """Read every file of the data sets that are there, and say of each set whether it is sound."""
    for name in names or []:
        _check_name(name)
    chosen = names or [name for name in datasets.entries() if _readable(name, root)]
    wrong = []
    for name in chosen:
        try:
            print(f"{name}: {_checked(name, root)}")
        except FedveilError as error:
            wrong.append(name)
            said = str(error)
            print(said if said.startswith(f"{name}:") else f"{name}: {said}")
    if wrong:
        raise FedveilError(f"{len(wrong)} of {len(chosen)} data sets cannot be used: {', '.join(wrong)}")


@app.command("show")
def _show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Data set: see `fedveil data list`; or file.py:dataset.", autocompletion=SETS
        ),
    ],
    clients: Annotated[str | None, option("task.clients")] = None,
    partition: Annotated[str | None, option("task.partition")] = None,
    split: Annotated[str | None, option("task.split")] = None,
    limit: Annotated[str | None, option("task.limit")] = None,
    root: Annotated[str | None, option("task.data_root")] = None,
    seed: Annotated[str | None, option("seed")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it, too: a page (.html) or the picture alone (.svg).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show how many training examples of each label every client would hold."""
    from fedveil.cli.show import show

    given = {"clients": clients, "partition": partition, "split": split, "limit": limit, "data_root": root}
    values = read_values({**{f"task.{key}": value for key, value in given.items()}, "seed": seed})
    show(name, values, out, as_json=as_json)


def _check_name(name: str) -> None:
    if name not in datasets.entries():
        raise unknown_name("data set", name, datasets.entries())


def _row(name: str, root: Path | None) -> dict[str, str]:
    if name not in SOURCES:
        return {"name": name, "state": "-", "where": WITHOUT_FILES.get(name, "defines itself where its files are")}
    there = locate(SOURCES[name], root)
    if there.complete:
        return {"name": name, "state": "there", "where": f"{there.folder}{_partly(name, there)}"}
    get = f"`fedveil data fetch {name}`" if SOURCES[name].remotes else SOURCES[name].how
    folder = there.folder if there.found else data_root(root) / SOURCES[name].folders[0]
    return {"name": name, "state": "missing", "where": f"{', '.join(there.missing)} in {folder}: {get}"}


def _partly(name: str, there: Located) -> str:
    lacking = [stem for stem in SOURCES[name].optional if stem not in there.found]
    return f" (without {', '.join(lacking)})" if lacking else ""


def _readable(name: str, root: Path | None) -> bool:
    return name in EMBEDDED or (name in SOURCES and locate(SOURCES[name], root).complete)


def _checked(name: str, root: Path | None) -> str:
    """Read a whole set and describe what it holds."""
    from fedveil.tasks.datasets.table import LoadedTable
    from fedveil.tasks.datasets.text import LoadedText
    from fedveil.tasks.fetch import matches
    from fedveil.tasks.image_files import ImageFiles

    data = datasets.build(name).load(root)
    for part in data.parts.values():
        if isinstance(part.images, ImageFiles):
            for index in range(len(part)):
                part.images.read(index)
    counts = " + ".join(f"{len(part):,}" for part in data.parts.values())
    shape = "×".join(map(str, data.shape))
    facts = [f"{counts} images, {shape}"]
    if isinstance(data, LoadedText):
        facts = [f"{counts} texts of up to {shape} tokens"]
    elif isinstance(data, LoadedTable):
        facts = [f"{counts} rows of {len(data.columns)} columns"]
    if data.note:
        facts.append(data.note)
    source = SOURCES.get(name)
    if source is not None and source.remotes and not source.archive:
        paths = {path.name: path for path in locate(source, root).found.values()}
        known = [remote for remote in source.remotes if remote.file in paths]
        same = sum(matches(paths[remote.file], remote.digest) for remote in known)
        facts.append("files as published" if same == len(source.remotes) else "not byte for byte the published files")
    return f"sound: {', '.join(facts)}"


@contextmanager
def _bar(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on a terminal, otherwise nothing."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        rows: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in rows:
                rows[file] = bar.add_task(file, total=total)
            bar.update(rows[file], completed=done, total=total)

        yield show
