"""`fedveil store`: what audits keep for each other, listed and removed."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

from fedveil.auditing.store import Listed, Store
from fedveil.errors import FedveilError

HOME = Path("fedveil-out")  # where runs and their store go that name no folder
NONE = "none"  # in place of a folder: nothing is kept


def store_of(given: Path | None) -> Store:
    """The store that the command line means: the one named, that of the environment, or the one beside the runs."""
    if given is None:
        given = Path(os.environ.get("FEDVEIL_STORE") or HOME / "store")
    return Store(None if str(given) == NONE else given)


def existing(given: Path | None) -> Store:
    """The same, for commands that make no store."""
    store = store_of(given)
    if store.folder is None or not store.folder.is_dir():
        raise FedveilError(f"there is no store at {store.folder or given}: name it with --store")
    return store


def list_entries(given: Path | None, *, as_json: bool) -> None:
    """Print every entry, the one that was used longest ago first, and what all take."""
    entries = existing(given).entries()
    if as_json:
        print(json.dumps([_plain(each) for each in entries], indent=1, ensure_ascii=False))
        return
    for each in entries:
        print(f"{each.used:%Y-%m-%d %H:%M}  {each.stage:<8}{_size(each.bytes):>10}  {each.about}")
    print(f"{len(entries)} entries, {_size(sum(each.bytes for each in entries))}")


def prune(given: Path | None, days: float) -> None:
    """Remove what was not used for so many days."""
    gone = existing(given).prune(datetime.timedelta(days=days))
    print(f"removed {len(gone)} entries, {_size(sum(each.bytes for each in gone))}")


def _plain(each: Listed) -> dict[str, object]:
    return {
        "stage": each.stage,
        "key": each.place.name,
        "about": each.about,
        "bytes": each.bytes,
        "used": each.used.isoformat(timespec="seconds"),
    }


def _size(count: int) -> str:
    """Bytes for people.

    >>> _size(900), _size(2_500_000)
    ('900 B', '2.5 MB')
    """
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB")
    power = min((len(str(count)) - 1) // 3, len(units))
    return f"{count / 1000**power:.1f} {units[power - 1]}"
