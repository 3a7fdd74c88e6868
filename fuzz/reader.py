"""What a campaign needs to know about a reader."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis.strategies import SearchStrategy

Files = dict[str, bytes]  # the contents of the folder given to a reader, by path


class Refused(Exception):
    """Raised if a reader refuses a file by other means than an error, such as an empty answer."""


@dataclass(frozen=True)
class Reader:
    """One reader: how its files are made, and how it is called."""

    name: str
    files: Callable[[], SearchStrategy[Files]]  # valid ones and mutated ones; called once in every worker
    read: Callable[[Path], object]  # given the folder; raises FedveilError or Refused to refuse it
    share: int = 1000  # files of a whole campaign, relative to the other readers
    memory: int = 2**26  # bytes that it may use for any file
    ratio: int = 4200  # more bytes that it may use per byte of the files; deflate alone unpacks to 1032


def lay_out(content: Files, folder: Path) -> None:
    """Make the folder hold these files and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
