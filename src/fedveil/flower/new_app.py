"""`fedveil flower new`: a runnable Flower app with a defense in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedveil.auditing.experiment import TaskSettings
from fedveil.errors import FedveilError
from fedveil.flower.rules import Rules
from fedveil.toml import to_toml


@dataclass(frozen=True)
class NewApp:
    """What a new app starts with."""

    data: str = "digits"
    model: str = "mlp"
    defense: str = "none"
    clients: int = 4
    rounds: int = 3
    batch_size: int = 16
    lr: float = 0.1
    local_epochs: int = 1
    seed: int = 0


def write_app(folder: Path, new: NewApp) -> list[Path]:
    """Write an app into a new or empty folder; returns its files."""
    _check(folder, new)
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-")
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package):
        raise FedveilError(f"{folder} cannot name a Python package: choose a name that starts with a letter")
    written = []
    for source, target in (
        ("task.py.txt", f"{package}/task.py"),
        ("client.py.txt", f"{package}/client.py"),
        ("server.py.txt", f"{package}/server.py"),
        ("README.md.txt", "README.md"),
    ):
        text = files("fedveil.flower.template").joinpath(source).read_text(encoding="utf-8")
        text = text.replace("PACKAGE", package).replace("NAME", name).replace("DATA", new.data)
        written.append(_write(folder / target, text))
    written.append(_write(folder / package / "__init__.py", f'"""{name}: a Flower app with a defense in it."""\n'))
    written.append(_write(folder / "pyproject.toml", _pyproject(name, package, new)))
    return sorted(written)


def _check(folder: Path, new: NewApp) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedveilError(f"{folder} is not empty: choose a new folder")
    from pydantic import ValidationError

    from fedveil.fields import problems

    try:
        TaskSettings(data=new.data, model=new.model, clients=new.clients)
    except ValidationError as error:
        raise FedveilError(problems(error)) from None
    rules = Rules.settle({}, {"defense": new.defense})
    if rules.chain.aggregates:
        raise FedveilError(f"{rules.chain} acts on a trusted server: choose a defense of the clients")
    rules.chain.check_message(rules.kind)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _pyproject(name: str, package: str, new: NewApp) -> str:
    settings: dict[str, Any] = {
        "data": new.data,
        "model": new.model,
        "clients": new.clients,
        "seed": new.seed,
        "defense": new.defense,
        "rounds": new.rounds,
        "batch-size": new.batch_size,
        "lr": float(new.lr),
        "local-epochs": new.local_epochs,
        "minimum": min(2, new.clients),
        "limit": 600.0,
        "record-rounds": "",
        "out": f"fedveil-out/{name}",
    }
    head = to_toml(
        {
            "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
            "project": {
                "name": name,
                "version": "1.0.0",
                "description": "A Flower app with a defense of fedveil in it.",
                "license": "Apache-2.0",
                # Flower would install what is listed here for every run. fedveil is installed once, by whoever runs it.
                "dependencies": [],
            },
        }
    )
    components = {"serverapp": f"{package}.server:app", "clientapp": f"{package}.client:app"}
    parts = {"": {"publisher": "fedveil"}, ".components": components, ".config": settings}
    tables = [to_toml({"t": table}).replace("[t]", f"[tool.flwr.app{end}]") for end, table in parts.items()]
    return head + "".join(tables)
