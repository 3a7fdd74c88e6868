"""`fedveil canary`: try by canaries whether a mechanism keeps its promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.display import FAILED
from fedveil.cli.options import names_of
from fedveil.errors import FedveilError
from fedveil.files import write_atomically


def canary(
    defense: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="One that clips and adds noise: dp-sgd, dp-gaussian, dp-clip, dp-laplace, cdp.",
            autocompletion=names_of("defenses"),
        ),
    ],
    data: Annotated[
        str,
        typer.Option(metavar="SPEC", help="Data set, or file.py:data.", autocompletion=names_of("datasets")),
    ] = "digits",
    model: Annotated[
        str, typer.Option(metavar="SPEC", help="Model, or file.py:Name.", autocompletion=names_of("models"))
    ] = "mlp:hidden=[2]",
    data_root: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the data files.", show_default="FEDVEIL_DATA or ~/.cache/fedveil"
        ),
    ] = None,
    canaries: Annotated[int, typer.Option(metavar="NUMBER", help="How many; more show more.")] = 1000,
    rounds: Annotated[int, typer.Option(metavar="NUMBER", help="Releases of each client, or steps.")] = 1,
    batch_size: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Of dp-sgd, on average.", show_default="all examples")
    ] = None,
    delta: Annotated[float, typer.Option(metavar="NUMBER", help="The δ at which ε is bounded and promised.")] = 1e-6,
    confidence: Annotated[float, typer.Option(metavar="NUMBER", help="Of the bound.")] = 0.95,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of coins, noise and weights.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the finding to this file, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the finding as JSON.")] = False,
    fail_if: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Exit with 3 at this finding: broken.", show_default=False)
    ] = None,
) -> int:
    """Measure a lower bound of ε by canaries, in one run, and set it beside the ε that is promised."""
    if fail_if not in (None, "broken"):
        raise FedveilError(f"--fail-if must be broken (got '{fail_if}')")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise FedveilError(f"--out must be a file in a folder that is there (got {out})")
    from fedveil.auditing.canaries import CanarySettings, audit_privacy
    from fedveil.tasks.task import task

    settings = CanarySettings(
        canaries=canaries, rounds=rounds, batch_size=batch_size, delta=delta, confidence=confidence
    )
    found = audit_privacy(defense, task(data, model=model, seed=seed, data_root=data_root), settings, seed=seed)
    told = json.dumps({**found.model_dump(), "broken": found.broken, "sentence": found.sentence}, ensure_ascii=False)
    if out is not None:
        write_atomically(out, told.encode())
    if as_json:
        print(told)
    else:
        print("\n".join([found.sentence, *found.notes]))
    if not found.broken or fail_if is None:
        return 0
    print("fedveil: failed, as --fail-if names 'broken'", file=sys.stderr)
    return FAILED
