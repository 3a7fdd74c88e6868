"""`fedveil federate`: train a task over Flower without writing an app."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.cli.options import names_of
from fedveil.errors import FedveilError
from fedveil.fields import parse_value

_FED, _FLOWER = "Federation", "Flower"


def federate(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the clients on this machine.", rich_help_panel=_FLOWER)
    ] = False,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Train over the nodes of this SuperLink.", rich_help_panel=_FLOWER),
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The CA that signed the SuperLink's certificate.", rich_help_panel=_FLOWER),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Talk to the SuperLink without TLS.", rich_help_panel=_FLOWER)
    ] = False,
    minimum: Annotated[
        int, typer.Option(metavar="NUMBER", help="Updates that a round needs.", min=1, rich_help_panel=_FLOWER)
    ] = 2,
    limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Of a round.", rich_help_panel=_FLOWER)
    ] = 600.0,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="For the nodes to come.", rich_help_panel=_FLOWER)
    ] = 300.0,
    aggregation: Annotated[
        str, typer.Option(metavar="TEXT", help="mean, median, trimmed-mean or krum.", rich_help_panel=_FLOWER)
    ] = "mean",
    malicious: Annotated[
        int, typer.Option(metavar="NUMBER", help="krum: clients that may be.", min=0, rich_help_panel=_FLOWER)
    ] = 0,
    batches_per_message: Annotated[
        int,
        typer.Option(metavar="NUMBER", help="FedSGD: batches behind one message.", min=1, rich_help_panel=_FLOWER),
    ] = 1,
    noise: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="secure (of the operating system) or seeded.",
            show_default="seeded in a simulation",
            rich_help_panel=_FLOWER,
        ),
    ] = None,
    track: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="tensorboard or mlflow, too.", rich_help_panel=_FLOWER)
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="SPEC", help="Data set.", autocompletion=names_of("datasets"))
    ] = "digits",
    model: Annotated[str, typer.Option(metavar="SPEC", help="Model.", autocompletion=names_of("models"))] = "lenet",
    clients: Annotated[int, typer.Option(metavar="NUMBER", help="Clients that share the data.", min=1)] = 4,
    partition: Annotated[str, typer.Option(metavar="SPEC", help="How clients share it.")] = "iid",
    data_limit: Annotated[
        int | None, typer.Option("--limit", metavar="NUMBER", help="At most this many training examples.", min=1)
    ] = None,
    buffers: Annotated[str, typer.Option(metavar="TEXT", help="shared or recalibrated.")] = "shared",
    data_root: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder of the data files.")] = None,
    defense: Annotated[
        str,
        typer.Option(
            metavar="SPEC", help="name:field=value,... Chains: join with +.", autocompletion=names_of("defenses")
        ),
    ] = "none",
    protocol: Annotated[str, typer.Option(metavar="TEXT", help="fedavg or fedsgd.", rich_help_panel=_FED)] = "fedavg",
    rounds: Annotated[int, typer.Option(metavar="NUMBER", help="Rounds.", min=1, rich_help_panel=_FED)] = 3,
    batch_size: Annotated[int, typer.Option(metavar="NUMBER", help="Of a step.", min=1, rich_help_panel=_FED)] = 8,
    lr: Annotated[float, typer.Option(metavar="NUMBER", help="Learning rate.", rich_help_panel=_FED)] = 0.1,
    local_epochs: Annotated[int, typer.Option(metavar="NUMBER", help="FedAvg.", min=1, rich_help_panel=_FED)] = 1,
    momentum: Annotated[float, typer.Option(metavar="NUMBER", help="Momentum.", rich_help_panel=_FED)] = 0.0,
    weight_decay: Annotated[float, typer.Option(metavar="NUMBER", help="Weight decay.", rich_help_panel=_FED)] = 0.0,
    upload: Annotated[
        str, typer.Option(metavar="TEXT", help="FedAvg: what is protected, weights or delta.", rich_help_panel=_FED)
    ] = "weights",
    sampling_rate: Annotated[
        float, typer.Option(metavar="NUMBER", help="Share of the clients in a round.", rich_help_panel=_FED)
    ] = 1.0,
    weighting: Annotated[str, typer.Option(metavar="TEXT", help="uniform or size.", rich_help_panel=_FED)] = "uniform",
    record_rounds: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Rounds whose updates are captured: 1,5.", rich_help_panel=_FED)
    ] = "",
    record_clients: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Of so many clients.", min=1, rich_help_panel=_FED)
    ] = None,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of data, weights, sampling.", min=0)] = 0,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Output folder; a run that stopped goes on in it.")
    ] = Path("fedveil-out/flower"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON and nothing else.")] = False,
) -> None:
    """Train over Flower: in its simulation, or over a SuperLink and its nodes. Started again, it goes on."""
    if simulate == (superlink is not None):
        raise FedveilError("say where to train: --simulate, or --superlink HOST:PORT")
    if superlink and not insecure and root_certificates is None:
        raise FedveilError("--superlink needs --root-certificates FILE, or --insecure in a network that you trust")
    numbers = [parse_value(part.strip()) for part in record_rounds.split(",") if part.strip()]
    chosen = noise or ("seeded" if simulate else "secure")
    if superlink and chosen == "seeded":
        raise FedveilError("noise from a seed is for simulations: its server could remove it; use --noise secure")
    settings: dict[str, Any] = {
        "task": {
            "data": data,
            "model": model,
            "clients": clients,
            "partition": partition,
            "limit": data_limit,
            "buffers": buffers,
            "data_root": data_root,
        },
        "federation": {
            "protocol": protocol,
            "rounds": rounds,
            "batch_size": batch_size,
            "lr": lr,
            "local_epochs": local_epochs,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "upload": upload,
            "sampling_rate": sampling_rate,
            "weighting": weighting,
            "record_rounds": numbers,
            "record_clients": record_clients,
        },
        "flower": {
            "minimum": minimum,
            "wait": wait,
            "limit": limit,
            "aggregation": aggregation,
            "malicious": malicious,
            "batches_per_message": batches_per_message,
            "track": track or [],
        },
        "defense": defense,
        "noise": chosen,
        "seed": seed,
        "out": out,
    }
    from fedveil.flower.federate import Where, run_task
    from fedveil.flower.task_settings import TaskRun

    where = Where(superlink=superlink, root_certificates=root_certificates)
    outcome = run_task(TaskRun(**settings), where, lambda line: None if as_json else _tell(line))
    if as_json:
        print(json.dumps({**outcome, "out": str(out)}, indent=1))
        return
    print(outcome["guarantee"]["sentence"])
    print(f"The model is {out / 'model.safetensors'}")


def _tell(line: dict[str, Any]) -> None:
    told = ", ".join(f"{name} {value:.3g}" for name, value in line["evaluation"].items())
    print(
        f"Round {line['round']}: {len(line['taken'])} of {len(line['asked'])} clients, {line['seconds']:.1f} s, {told}"
    )
    for word in ("refused", "failed", "lost"):
        for client, why in line[word].items():
            print(f"  client {client} {word}: {why}")
