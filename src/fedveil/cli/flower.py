"""`fedveil flower`: write a Flower app with a defense in it, and run one in a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import names_of

app = typer.Typer(help="Write a Flower app with a defense in it; run one in a simulation.")


@app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder; its name is the app's.")],
    data: Annotated[
        str, typer.Option(metavar="SPEC", help="Data set to begin with.", autocompletion=names_of("datasets"))
    ] = "digits",
    model: Annotated[
        str, typer.Option(metavar="SPEC", help="Model to begin with.", autocompletion=names_of("models"))
    ] = "mlp",
    defense: Annotated[
        str,
        typer.Option(
            metavar="SPEC", help="What clients protect their updates with.", autocompletion=names_of("defenses")
        ),
    ] = "none",
    clients: Annotated[int, typer.Option(metavar="NUMBER", help="Clients that share the data.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(metavar="NUMBER", help="Rounds of a run.", min=1)] = 3,
    batch_size: Annotated[int, typer.Option(metavar="NUMBER", help="Examples per step of a client.", min=1)] = 16,
    lr: Annotated[float, typer.Option(metavar="NUMBER", help="Learning rate of the clients.")] = 0.1,
    local_epochs: Annotated[int, typer.Option(metavar="NUMBER", help="Epochs of a round.", min=1)] = 1,
) -> None:
    """Write a runnable app: settings, client, server, data and model, and a README that says how to go on."""
    from fedveil.flower.new_app import NewApp, write_app

    made = NewApp(
        data=data,
        model=model,
        defense=defense,
        clients=clients,
        rounds=rounds,
        batch_size=batch_size,
        lr=lr,
        local_epochs=local_epochs,
    )
    for path in write_app(folder, made):
        print(path)
    print(f"Run it with `fedveil flower run {folder}`")


@app.command("run")
def run(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Flower app.")],
    nodes: Annotated[int | None, typer.Option(metavar="NUMBER", help="Simulated clients.", min=1)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-c", metavar="KEY=VALUE", help="A setting of the run, as in -c 'rounds=5'. Repeat."),
    ] = None,
    log: Annotated[Path, typer.Option(metavar="FILE", help="What Flower says.")] = Path("flower.log"),
) -> None:
    """Run any Flower app in a simulation on this machine. Nothing calls home, and nothing is left running."""
    from fedveil.flower.federate import run_app

    run_app(folder, nodes, settings or [], log)
