"""Pictures of 224 and 256 pixels and a ResNet-18: what one update gives away, how long it takes, in how much memory.

Needs `hires/imagenet` and `hires/chest-xray` under FEDVEIL_DATA, each with `images/` and `labels.tsv`; one whose files
are missing is left out, and says so. A few steps only: the published attack makes 30,000. Goes on from the rows of
before.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import Table, measured

# Polishing goes far on networks of sigmoids, which are smooth: each of its steps is twenty evaluations.
ATTACKS = ("ci-net:steps=60,polish=5", "inverting-gradients:steps=40,restarts=1,polish=5")
ROLES = {"ceiling": "no defense", "noise-floor": "noise for the update", "mean-floor": "a guess: the mean image"}


@dataclass(frozen=True)
class Pictures:
    """Large pictures, as they lie in a data root."""

    folder: str
    group: Callable[[dict[str, str]], str]  # the class of a line of labels.tsv: few, as there are few pictures
    size: int
    channels: int

    @property
    def words(self) -> str:
        """What the table calls them."""
        return f"{self.folder}, {self.size} px"


SETS = (
    Pictures("imagenet", lambda line: line["imagenet_class_index"].zfill(3)[0], 224, 3),
    Pictures("chest-xray", lambda line: "covid-19" if "COVID-19" in line["finding"] else "other", 256, 1),
)


def measure() -> Iterator[list[Table]]:
    fresh = Table(
        "Large pictures: one update of one picture, resnet18 with sigmoids, untrained",
        ["pictures", "attack", "attacker", "PSNR (dB)", "SSIM", "minutes of the whole audit", "peak memory (GB)"],
        "One victim: nothing but a look, so without intervals. Attacks: "
        + ", ".join(f"`{each}`" for each in ATTACKS)
        + ". Minutes on two cores with a process each.",
    )
    table = next(iter(measured("high-resolution")), fresh)
    for pictures in SETS:
        if pictures.words in [row[0] for row in table.rows]:
            continue
        source = Path(os.environ.get("FEDVEIL_DATA", "")) / "hires" / pictures.folder
        if not (source / "labels.tsv").is_file():
            print(f"high-resolution leaves {pictures.folder} out: FEDVEIL_DATA has no hires/{pictures.folder}")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            add(table, pictures, audited(pictures, source, Path(scratch)))
        yield [table]


def audited(pictures: Pictures, source: Path, scratch: Path) -> tuple[dict[str, object], float, float]:
    """The result of `fedveil audit`, its minutes, and the most memory that it or a worker held."""
    with (source / "labels.tsv").open(encoding="utf-8", newline="") as lines:
        for number, line in enumerate(csv.DictReader(lines, delimiter="\t")):
            folder = scratch / "pictures" / ("test" if number % 3 == 0 else "train") / pictures.group(line)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / "images" / line["filename"], folder)
    data = f"image-folder:path=pictures,size={pictures.size},channels={pictures.channels}"
    command = ["-m", "fedveil", "audit", "--data", data, "--data-root", str(scratch), "--out", str(scratch / "out")]
    command += ["--model", "resnet18:activation=sigmoid", "--clients", "2", "--rounds", "0", "--no-link"]
    command += [
        "--reference",
        "none",
        "--victims",
        "1",
        "--candidates",
        "10",
        *(word for each in ATTACKS for word in ("--attack", each)),
    ]
    begun = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    minutes = (time.perf_counter() - begun) / 60
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return json.loads((scratch / "out" / "result.json").read_text()), minutes, memory


def add(table: Table, pictures: Pictures, found: tuple[dict[str, object], float, float]) -> None:
    result, minutes, memory = found
    for row in result["rows"]:  # type: ignore[attr-defined]
        if row["attack"] == "all attacks together":
            continue
        psnr, ssim = (row["metrics"][name]["mean"] for name in ("psnr", "ssim"))
        who = ROLES[row["role"]]
        table.add(
            pictures.words,
            row["attack"] or "none",
            who,
            f"{psnr:.1f}",
            f"{ssim:.2f}",
            f"{minutes:.1f}",
            f"{memory:.1f}",
        )
        print(table.rows[-1], flush=True)
