"""A model or data from the user's own Python file, as a task takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedveil.errors import FedveilError
from fedveil.tasks.arrays import check_not_one_hot
from fedveil.tasks.own_data import OwnData, Reader
from fedveil.tasks.own_files import Reference
from fedveil.tasks.splits import OwnSplit, Split, read_split

CLIENTS = 4  # by default
# The keys that a dict may have: parameters of `Task`.
KEYWORDS = ("data", "clients", "split", "loss", "normalization", "normalized", "class_names", "columns", "perturb")


@dataclass(frozen=True)
class FileModel:
    """`file.py:Net`: a module, or a class or function that returns one."""

    reference: Reference

    @property
    def name(self) -> str:
        """Its name in reports."""
        return self.reference.name

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module, called with nothing, or with `shape` and `classes` if it takes them."""
        made = self.reference.load()
        if not isinstance(made, nn.Module) and callable(made):
            made = self.reference.call(made, {"shape": shape, "classes": classes})
        if not isinstance(made, nn.Module):
            raise FedveilError(f"{self.reference.short} must be or return a torch.nn.Module, not {type(made).__name__}")
        return made


@dataclass(frozen=True, eq=False)
class FileData:
    """The examples of `file.py:dataset`, and what else the file says about the task."""

    reference: Reference
    own: OwnData
    said: Mapping[str, Any]

    @property
    def code_hash(self) -> str:
        """The hash of the file if the loss comes from it, else empty; the data have a hash of their own."""
        return self.reference.sha256() if self.said.get("loss") is not None else ""

    def rest(self) -> dict[str, Any]:
        """What the file says beyond the data, as keywords of `Task`."""
        return {key: value for key, value in self.said.items() if key not in ("data", "clients", "split")}


def read_file_data(text: str, clients: int, split: Split, seed: int) -> FileData:
    """Load what a file holds: data as `Task` takes them, a dict of `Task`'s keywords, or a function that returns them.

    What the file says takes precedence; the split and the number of clients apply where it says nothing.
    """
    reference = Reference.read(text)
    found = reference.load()
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        found = reference.call(found, {})
    said = dict(found) if isinstance(found, Mapping) else {"data": found}
    unknown = [str(key) for key in said if key not in KEYWORDS]
    if unknown:
        raise FedveilError(f"{reference.short} has {', '.join(unknown)}: it may have {', '.join(KEYWORDS)}")
    whose = said.get("clients", clients)
    if clients not in (CLIENTS, whose if isinstance(whose, int) else len(whose)):
        raise FedveilError(f"{reference.short} says who its clients are: leave the number of clients out")
    own_split = said.get("split")
    chosen = None if split == OwnSplit() else split
    if own_split is not None:
        if chosen is not None and chosen != read_split(own_split):
            raise FedveilError(f"{reference.short} says how it is split, {own_split}: leave the split out")
        chosen = read_split(own_split)
    reader = Reader(chosen, seed, said.get("normalization"), bool(said.get("normalized", False)), said.get("columns"))
    try:
        own = reader.read(said.get("data"), whose)
        if said.get("loss") is None:
            check_not_one_hot(own.parts.train.labels)
    except FedveilError as error:
        raise FedveilError(f"{reference.short}: {error}") from None
    return FileData(reference, own, said)
