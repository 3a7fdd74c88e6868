"""From a result to one self-contained HTML page: no script, no network, pictures and charts inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.auditing.again import config_file, config_toml
from fedveil.auditing.result import Images, Result
from fedveil.auditing.table import attacker_has
from fedveil.errors import FedveilError
from fedveil.files import write_atomically
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.modalities import modality
from fedveil.leakage.modality import LINKED
from fedveil.report import clients, members, view
from fedveil.report.environment import environment
from fedveil.report.grid import grid
from fedveil.report.rows import rows
from fedveil.report.sentences import sentences
from fedveil.report.summary import summary


def render(result: Result, images: Images) -> str:
    """The report as one HTML document. All text of the result is escaped."""
    _check(result, images)
    shown, known, kind = grid(result, images), len(images.originals) > 0, modality(result.modality)
    return (
        environment()
        .get_template("report.html")
        .render(
            result=result,
            ROLES=view.words(result),
            summary=summary(result, shown),
            grid=shown,
            rows=rows(result, images),
            sentences=sentences(result, images),
            table=view.table(result),
            cost_charts=view.cost_charts(result.cost),
            cost_rows=list(view.cost_rows(result.cost)),
            holdings=None if result.holdings is None else clients.held(result.holdings),
            links=view.links(result),
            tellers=members.tellers(result),
            tellers_charts=members.drawn(result),
            member_metrics=members.metrics(),
            attacks=[
                (
                    run,
                    view.attack_facts(run, known=known),
                    view.attack_charts(run, kind.words),
                    view.on_the_way(run, kind.words),
                )
                for run in result.attacks
            ],
            kind=kind,
            linked=METRICS[LINKED],
            attacker_has=attacker_has,
            config=config_toml(result.provenance.config),
            repeats=config_file(result.provenance.config) is not None,
        )
    )


def write_report(result: Result, images: Images, path: Path) -> None:
    """Write the report to a file, whole or not at all."""
    write_atomically(path, render(result, images).encode())


def _check(result: Result, images: Images) -> None:
    shape = images.originals.shape
    if result.table is not None:
        cells = [images.originals, *images.reconstructions.values()]
        if any(each.ndim != 2 or each.shape[1] != len(result.table.columns) for each in cells):
            raise FedveilError(f"the rows have shape {shape}: (rows, {len(result.table.columns)} columns) is needed")
    elif result.text is not None:
        if images.originals.ndim != 2:
            raise FedveilError(f"the sentences have shape {shape}: (sentences, places) is needed")
    elif images.originals.ndim != 4:
        raise FedveilError(f"the original images have shape {shape}: (images, channels, height, width) is needed")
    labels = images.labels
    if labels.ndim not in (1, 2) or labels.dtype.kind not in "iuf" or not np.isfinite(labels).all():
        raise FedveilError(
            f"the labels of the images are {images.labels.dtype} of shape {images.labels.shape}: one number or a row "
            "of numbers for each is needed"
        )
    for (attack, role), pictures in images.reconstructions.items():
        if pictures.ndim != len(shape) or pictures.shape[1:] != shape[1:]:
            raise FedveilError(
                f"the images of {attack or 'no attack'} ({role}) have shape {pictures.shape}, "
                f"the originals {shape}: they must agree in channels, height and width"
            )
