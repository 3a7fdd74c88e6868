from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.task import task

from .conftest import png_bytes

HEADER = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age\n"
FINDINGS = ["No Finding", "Cardiomegaly|Emphysema", "Hernia", "Mass", "Pleural_Thickening|Mass|Edema"]


def write(folder: Path, count: int = 20, *, lists: bool = False, there: int | None = None) -> Path:
    rows = [f"{n:08d}_000.png,{FINDINGS[n % 5]},0,{n // 2},50" for n in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Data_Entry_2017.csv").write_text(HEADER + "\n".join(rows) + "\n")
    for n in range(count if there is None else there):
        place = folder / f"images_{n % 3:03d}" / "images"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{n:08d}_000.png").write_bytes(png_bytes(np.full((20, 20), 10 * n)))
    if lists:
        (folder / "train_val_list.txt").write_text("\n".join(f"{n:08d}_000.png" for n in range(count - 4)))
        (folder / "test_list.txt").write_text("\n".join(f"{n:08d}_000.png" for n in range(count - 4, count)))
    return folder


def test_findings_become_zeros_and_ones(tmp_path: Path) -> None:
    write(tmp_path / "nih-chestxray", lists=True)
    data = datasets.parse("nih-chestxray:size=16").load(tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape, data.note) == (16, 4, 14, (1, 16, 16), "")
    rows = [[data.class_names[i] for i in np.flatnonzero(row)] for row in data.train.labels[:5]]
    assert rows == [[], ["Cardiomegaly", "Emphysema"], ["Hernia"], ["Mass"], ["Mass", "Edema", "Pleural_Thickening"]]
    assert data.train.images.read(3).max() == 30


def test_without_the_lists_no_patient_is_in_both_parts(tmp_path: Path) -> None:
    write(tmp_path)
    data = datasets.parse("nih-chestxray:size=16").load(tmp_path)
    patients = [{int(Path(name).name[:8]) // 2 for name in part.images.names} for part in (data.train, data.test)]
    assert not patients[0] & patients[1]
    assert [len(found) for found in patients] == [8, 2]


def test_missing_images_are_counted(tmp_path: Path) -> None:
    write(tmp_path, there=12)
    made = task("nih-chestxray:size=16", model="mlp:hidden=[4]", data_root=tmp_path, clients=2)
    assert made.note == "12 of 20 images are there"
    assert (made.classes, made.labels, made.shape) == (None, 14, (1, 16, 16))
    inputs, targets = made.train.batch([0, 1])
    loss = made.loss(made.model(inputs), targets)
    by_hand = torch.nn.BCEWithLogitsLoss()(made.model(inputs), targets)
    assert loss.equal(by_hand)


@pytest.mark.parametrize(
    "table, line",
    [
        ("a,b\n1,2\n", "has no column Finding Labels, Image Index, Patient ID"),
        (HEADER + "x.png,Gout,0,1,50\n", "line 2: unknown finding 'Gout'"),
        (HEADER + "x.png\n", "line 2: unknown finding ''"),
        (HEADER + "x.png,Mass,0,1,50\n", "none of the training images of Data_Entry_2017.csv is below"),
        (HEADER, "none of the training images"),
        ("", "has no column"),
        ("x" * 140_000 + ",b\n1,2\n", "field larger than field limit"),
        (HEADER + "x" * 140_000 + ",Mass,0,1,50\n", "field larger than field limit"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, table: str, line: str) -> None:
    write(tmp_path)
    (tmp_path / "Data_Entry_2017.csv").write_text(table)
    with pytest.raises(FedveilError, match=line):
        datasets.build("nih-chestxray").load(tmp_path)
