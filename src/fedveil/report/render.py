"""From a result to one self-contained HTML page: no script, no network, pictures and charts inside."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedveil.auditing.result import Images, Result
from fedveil.errors import FedveilError
from fedveil.files import write_atomically
from fedveil.report import view, words


def render(result: Result, images: Images) -> str:
    """The report as one HTML document. All text of the result is escaped."""
    _check(images)
    return (
        _environment()
        .get_template("report.html")
        .render(
            result=result,
            strip=view.strip(result),
            lead=view.lead(result),
            grid=view.grid(result, images),
            table=view.table(result),
            cost_charts=view.cost_charts(result.cost),
            cost_rows=list(view.cost_rows(result.cost)),
            attacks=[(run, view.attack_charts(run)) for run in result.attacks],
            config=json.dumps(result.provenance.config, indent=2, ensure_ascii=False, default=str),
        )
    )


def write_report(result: Result, images: Images, path: Path) -> None:
    """Write the report to a file, whole or not at all."""
    write_atomically(path, render(result, images).encode())


def _check(images: Images) -> None:
    shape = images.originals.shape
    if images.originals.ndim != 4:
        raise FedveilError(f"the original images have shape {shape}: (images, channels, height, width) is needed")
    for (attack, role), pictures in images.reconstructions.items():
        if pictures.ndim != 4 or pictures.shape[1:] != shape[1:]:
            raise FedveilError(
                f"the images of {attack or 'no attack'} ({role}) have shape {pictures.shape}, "
                f"the originals {shape}: they must agree in channels, height and width"
            )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedveil.report", "templates"),
        autoescape=True,  # for every file, whatever its name: the result holds text of strangers
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["words"] = words
    return environment
