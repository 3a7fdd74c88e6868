"""The kinds of data that can be scored, by name. Readable without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.errors import unknown_name
from fedveil.leakage.modality import Modality
from fedveil.leakage.pictures import Pictures
from fedveil.leakage.records import Records
from fedveil.leakage.sentences import Sentences

if TYPE_CHECKING:
    from fedveil.tasks.task import Task

MODALITIES: dict[str, Modality] = {each.name: each for each in (Pictures(), Records(), Sentences())}


def modality(name: str) -> Modality:
    """The modality of that name; an unknown one raises a `FedveilError` that lists them."""
    if name not in MODALITIES:
        raise unknown_name("kind of data", name, MODALITIES)
    return MODALITIES[name]


def modality_of(task: Task) -> Modality:
    """The kind of data that a task has."""
    if task.text is not None:
        return modality("sentences")
    return modality("pictures" if task.columns is None else "records")
