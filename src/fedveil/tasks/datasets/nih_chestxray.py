"""NIH ChestX-ray14 (Wang et al., 2017)."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import datasets
from fedveil.tasks.datasets.base import DataSet, LoadedData, Part
from fedveil.tasks.datasets.statistics import statistics
from fedveil.tasks.image_files import ImageFiles
from fedveil.tasks.sources import find_files

TABLE = "Data_Entry_2017.csv"
LIMIT = 2**27  # bytes of the table
TEST_SHARE = 5  # without the lists, one in this many patients is in the test part


@datasets.register("nih-chestxray")
@declared
class NIHChestXray(DataSet):
    """Chest X-rays, gray, 14 findings of which an image has any number; 112,120 images of 30,805 patients.

    The parts are those of the two lists that come with the set; without them every fifth patient is in the test part.
    Images may be in any folder below. Missing ones are left out, and `note` says how many. Images are read when they
    are needed.
    """

    size: Count = 256  # pixels of a side

    class_names = (
        "Atelectasis",
        "Cardiomegaly",
        "Effusion",
        "Infiltration",
        "Mass",
        "Nodule",
        "Pneumonia",
        "Pneumothorax",
        "Consolidation",
        "Edema",
        "Emphysema",
        "Fibrosis",
        "Pleural_Thickening",
        "Hernia",
    )

    def load(self, root: Path | None = None) -> LoadedData:
        """Read the table and list the images below its folder."""
        found = find_files(self.name, root)
        table = found[TABLE]
        top = table.parent
        rows = self._rows(table)
        paths = _pictures(top)
        there = [row for row in rows if row[0] in paths]
        in_test = _test_images(found, rows)
        parts = []
        for label, test in (("training", False), ("test", True)):
            chosen = [row for row in there if (row[0] in in_test) is test]
            if not chosen:
                raise FedveilError(f"nih-chestxray: none of the {label} images of {table.name} is below {top}")
            names = tuple(paths[name] for name, _, _ in chosen)
            parts.append(Part(ImageFiles(top, names, self.size, 1), np.stack([labels for _, labels, _ in chosen])))
        return LoadedData(
            name="nih-chestxray",
            train=parts[0],
            test=parts[1],
            normalization=statistics(parts[0], table),
            class_names=self.class_names,
            note="" if len(there) == len(rows) else f"{len(there):,} of {len(rows):,} images are there",
        )

    def _rows(self, table: Path) -> list[tuple[str, np.ndarray, str]]:
        """Image, findings as zeros and ones, patient."""
        if table.stat().st_size > LIMIT:
            raise FedveilError(f"{table}: larger than {LIMIT:,} bytes")
        number = {name: index for index, name in enumerate(self.class_names)}
        rows = []
        with table.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.DictReader(file)
            try:
                lacking = {"Image Index", "Finding Labels", "Patient ID"} - set(reader.fieldnames or ())
                if lacking:
                    raise FedveilError(f"{table}: has no column {', '.join(sorted(lacking))}")
                for row in reader:
                    labels = np.zeros(len(number), dtype=np.float32)
                    for finding in (row["Finding Labels"] or "").split("|"):
                        if finding in number:
                            labels[number[finding]] = 1
                        elif finding != "No Finding":
                            raise FedveilError(f"{table}, line {reader.line_num}: unknown finding '{finding:.40}'")
                    rows.append((row["Image Index"], labels, row["Patient ID"] or ""))
            except csv.Error as error:
                raise FedveilError(f"{table}, line {reader.line_num}: {error}") from None
        return rows


def _pictures(top: Path) -> dict[str, str]:
    """Where every PNG file below the folder is, by its name."""
    found = {}
    for folder, folders, names in os.walk(top):
        folders.sort()
        inside = Path(folder).relative_to(top)
        found.update({name: str(inside / name) for name in names if name.endswith(".png")})
    return found


def _test_images(found: dict[str, Path], rows: list[tuple[str, np.ndarray, str]]) -> set[str]:
    if "test_list.txt" in found:
        return set(found["test_list.txt"].read_text(encoding="utf-8", errors="replace").split())
    # By patient: images of one person in both parts would make the test too easy.
    patients = sorted({patient for _, _, patient in rows})
    chosen = set(patients[TEST_SHARE - 1 :: TEST_SHARE])
    return {name for name, _, patient in rows if patient in chosen}
