"""The kinds of data that can be scored, by name. Readable without torch."""

from __future__ import annotations

from fedveil.errors import unknown_name
from fedveil.leakage.modality import Modality
from fedveil.leakage.pictures import Pictures

MODALITIES: dict[str, Modality] = {each.name: each for each in (Pictures(),)}


def modality(name: str) -> Modality:
    """The modality of that name; an unknown one raises a `FedveilError` that lists them."""
    if name not in MODALITIES:
        raise unknown_name("kind of data", name, MODALITIES)
    return MODALITIES[name]
