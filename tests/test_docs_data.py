"""docs/data.md is true: its tables say what the classes say, and every example works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedveil as fv
from fedveil.errors import FedveilError
from fedveil.fields import field_names
from fedveil.registry import datasets, models
from fedveil.tasks.from_files import KEYWORDS
from fedveil.tasks.partition import partitions
from fedveil.tasks.sources import SOURCES
from fedveil.tasks.splits import read_split
from pages import ROOT, assert_links_lead_to_files, assert_runs, blocks

TEXT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
NO_FILES = {
    **dict.fromkeys(("breast-cancer", "digits"), "none"),
    **dict.fromkeys(("csv", "sentences", "text"), "your own file"),
    "image-folder": "your own folder",
}


def table(head: str) -> list[list[str]]:
    """The rows of the table with that head."""
    lines = TEXT[TEXT.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def dataset_rows() -> list[list[str]]:
    return [[f"`{name}`", entry.summary, files_of(name)] for name, entry in datasets.entries().items()]


def files_of(name: str) -> str:
    if name not in SOURCES:
        return NO_FILES[name]
    source = SOURCES[name]
    first, *others = source.files + source.optional
    return ", ".join([f"`{source.folders[0]}/{first}`", *(f"`{file}`" for file in others)])


def model_rows() -> list[list[str]]:
    return [[f"`{name}`", entry.summary, fields_of(name)] for name, entry in models.entries().items()]


def fields_of(name: str) -> str:
    made = models.build(name)
    values = ((field, getattr(made, field)) for field in field_names(type(made)))
    return ", ".join(f"`{field} = {spelled(value)}`" for field, value in values) or "—"


def spelled(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else "none" if value is None else str(value)


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")


def test_the_tables_say_what_the_classes_say() -> None:
    assert table("| name | what it holds |") == dataset_rows()
    assert table("| name | what it is |") == model_rows()


def test_python_blocks_run_one_after_another() -> None:
    scope = {"__name__": "data"}
    for code in blocks(TEXT, "python"):
        exec(compile(code, "data.md", "exec"), scope)
    assert scope["task"].target.kind == "numbers"
    assert scope["result"].result.row("ceiling", "analytic").metrics["identified"].mean == 1.0
    assert scope["choice"].why


def test_commands_run(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(12):
            pixels = noise.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number}.png")
    (own,) = blocks(TEXT, "py")
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    commands = [line for block in blocks(TEXT, "sh") for line in block.splitlines()]
    assert len(commands) == 6
    for command in commands:
        assert_runs(command, tmp_path)
    assert (tmp_path / "fedveil-out/pictures/report.html").exists()
    assert (tmp_path / "fedveil-out/clients.html").exists()
    own_report = (tmp_path / "fedveil-out/own/report.html").read_text(encoding="utf-8")
    assert "own.py:scans" in own_report
    assert ">healthy" in own_report or ">ill" in own_report


def test_the_text_says_what_a_file_may_hold() -> None:
    said = TEXT[TEXT.index("a dict of `data`") :].partition(", or a function")[0]
    assert tuple(re.findall(r"`(\w+)`", said)) == KEYWORDS


def test_hospitals_train_on_as_many_rows_as_the_text_says() -> None:
    rows = torch.rand(200, 4), torch.arange(200) % 2
    every, some = (fv.Task(nn.Linear(4, 2), rows, clients=[range(80), range(80, end)]) for end in (200, 160))
    assert [len(places) for places in every.clients] == [56, 84]
    assert len(every.test) == 12 + 18
    assert [len(places) for places in some.clients] == [80, 80]
    assert len(some.test) == 20


@pytest.mark.parametrize("spec", re.findall(r"`--(?:model|partition|split) (?!file.py)([^`]+)`", TEXT))
def test_what_the_text_names_can_be_chosen(spec: str) -> None:
    readers = (models.parse, partitions.parse, read_split)
    assert sum(_reads(reader, spec) for reader in readers) == 1


def _reads(reader: Callable[[str], object], spec: str) -> bool:
    try:
        reader(spec)
    except FedveilError:
        return False
    return True
