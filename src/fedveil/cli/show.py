"""`fedveil data show`: how the labels would be distributed over the clients, as table, numbers and picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fedveil.cli.config import Config
from fedveil.cli.options import Given
from fedveil.registry import datasets
from fedveil.report.clients import check_picture_path, facts, write_picture
from fedveil.tasks.client_labels import ClientLabels
from fedveil.tasks.own_files import is_reference
from fedveil.tasks.task import client_labels_of

MOST_LINES = 40


def show(name: str, values: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Count and print; draw if `out` is given. The keys of `values` are those of the configuration file."""
    if out is not None:
        check_picture_path(out)
    if not is_reference(name):
        datasets.parse(name)  # so that the error for a wrong name does not speak of the option --data
    config = Config.load("audit", Given({**values, "task.data": name}, None, False))
    task = config.task
    held = client_labels_of(
        task.data,
        clients=task.clients,
        split=task.split,
        partition=task.partition,
        seed=config.seed,
        data_root=task.data_root,
        limit=task.limit,
    )
    if out is not None:
        write_picture(held, name, out)
    if as_json:
        numbers = {key: getattr(held, key) for key in ("labels_per_client", "distance", "distance_by_chance")}
        picture = {} if out is None else {"picture": str(out)}
        print(json.dumps({"data": name, **held.model_dump(), **numbers, **picture}, ensure_ascii=False))
        return
    lines = table(held, shutil.get_terminal_size().columns)
    for line in [*lines, ""] if lines else []:
        print(line)
    for fact, value in facts(held):
        print(f"{fact.ljust(28)}  {value}")
    if out is not None:
        print(f"\nThe picture is {out}")
    elif not lines:
        print("\nToo many for a table here: --out FILE.html draws them, --json lists them")


def table(held: ClientLabels, width: int) -> list[str]:
    """Examples of each label and client, with clients as columns or as rows, whichever fits; empty if neither does.

    >>> print("\\n".join(table(ClientLabels(labels=["cat", "dog"], sizes=[9, 3], counts=[[7, 2], [0, 3]]), 80)))
    label  client 0  1  all
    cat           7  0    7
    dog           2  3    5
    all           9  3   12
    """
    # If examples have several labels or none, the columns do not add up; the last line counts examples.
    rows = [["label", *(f"{'' if i else 'client '}{i}" for i in range(len(held.sizes))), "all"]]
    for name, counts, total in zip(held.labels, zip(*held.counts, strict=True), held.totals, strict=True):
        rows.append([name, *(f"{count:,}" for count in counts), f"{total:,}"])
    rows.append(["examples" if held.several else "all", *(f"{n:,}" for n in held.sizes), f"{sum(held.sizes):,}"])
    turned = [list(column) for column in zip(*rows, strict=True)]
    turned[0][:2] = ["client", f"label {turned[0][1]}"]
    turned[1][0] = "0"
    for lines in (rows, turned):
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= width and len(lines) <= MOST_LINES:
            return [
                "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
            ]
    return []
