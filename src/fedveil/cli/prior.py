"""`fedveil prior`: train a generator of pictures for attacks that search with one, and show what is in its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.options import names_of
from fedveil.errors import FedveilError

if TYPE_CHECKING:
    from fedveil.attacks.prior_file import PriorHeader

PARTS = {"train": "training images", "test": "test images"}

app = typer.Typer(help="Train a generator that attacks search with (gias, latent-start), and show what it is.")


@app.command("train")
def _train(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it: prior.safetensors.")],
    data: Annotated[
        str,
        typer.Option(metavar="SPEC", help="Data set: see `fedveil data list`.", autocompletion=names_of("datasets")),
    ] = "digits",
    part: Annotated[str, typer.Option(metavar="TEXT", help="Which part of it: train or test.")] = "train",
    data_root: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the data files.", show_default="FEDVEIL_DATA or ~/.cache/fedveil"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="NUMBER", help="Learn from at most so many pictures.", min=1)] = 20_000,
    latents: Annotated[int, typer.Option(metavar="NUMBER", help="Numbers for a picture.", min=1, max=4096)] = 64,
    epochs: Annotated[
        int,
        typer.Option(metavar="NUMBER", help="Passes over them.", show_default="as make 3,000 steps", min=0, max=10_000),
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of all random numbers.", min=0)] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show progress.")] = False,
) -> None:
    """Train a generator on the pictures of a data set and write it to a file, with what it was trained on."""
    if part not in PARTS:
        raise FedveilError(f"--part must be train or test (got '{part}')")
    _check_place(out, overwrite=overwrite)
    from fedveil.attacks.generator import GeneratorSettings
    from fedveil.attacks.prior_file import Prior
    from fedveil.progress import reporting
    from fedveil.registry import datasets
    from fedveil.tasks.datasets.base import LoadedData
    from fedveil.tasks.splits import OwnSplit

    source = datasets.parse(data)
    loaded = source.load(data_root)
    if not isinstance(loaded, LoadedData):
        raise FedveilError(f"{data} is text: a generator learns from pictures")
    parts = OwnSplit(validation=0).divide(loaded, 0)
    settings = GeneratorSettings(latents=latents, epochs=epochs, most=limit)
    with reporting(False if quiet else None, f"training a generator on {source.name}") as report:
        prior = Prior.train(
            parts.train if part == "train" else parts.test,
            source.name,
            part=PARTS[part],
            normalization=loaded.normalization,
            classes=loaded.classes,
            settings=settings,
            seed=seed,
            report=report,
        )
    prior.save(out)
    print(f"{out}: a generator of {prior.header.words}, {prior.header.held_out:.1f} dB on pictures held out")


@app.command("show")
def _show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `fedveil prior train`.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what a generator was trained on, how, and how well it gives back pictures that it did not see."""
    from fedveil.attacks.prior_file import Prior

    header = Prior.load(file).header
    if as_json:
        print(json.dumps(header.model_dump(), ensure_ascii=False))
        return
    for fact, value in _facts(header):
        print(f"{fact.ljust(14)}  {value}")


def _facts(header: PriorHeader) -> list[tuple[str, str]]:
    return [
        ("trained on", header.words),
        ("their content", header.content),
        ("pictures", "×".join(map(str, header.shape)) + f", {header.classes} classes"),
        ("normalization", str(header.normalization or "none")),
        ("latents", str(header.latents)),
        ("epochs", str(header.epochs)),
        ("seed", str(header.seed)),
        ("held out", f"{header.held_out:.1f} dB"),
        ("trained by", f"fedveil {header.fedveil}"),
    ]


def _check_place(out: Path, *, overwrite: bool) -> None:
    """Refuse a place that cannot be written to, before anything is trained."""
    if out.is_dir() or not out.parent.is_dir():
        raise FedveilError(f"--out must be a file in a folder that is there (got {out})")
    if out.exists() and not overwrite:
        raise FedveilError(f"{out} is there already: choose another --out or add --overwrite")
