"""`fedveil list`: what can be chosen by name, and the fields of one of them."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Any

import typer

from fedveil.auditing.suites import SUITES, Suite
from fedveil.cli.explain import explained, presets
from fedveil.cli.options import names_of
from fedveil.errors import FedveilError, unknown_name
from fedveil.leakage.catalog import METRICS
from fedveil.registry import REGISTRIES, Entry, spelled

KINDS = (*REGISTRIES, "suites", "metrics")


def show_list(kind: str | None, name: str | None, *, as_json: bool) -> None:
    """Print all kinds, one kind, or one thing with its fields. Only the last imports heavy libraries."""
    if kind is not None and kind not in KINDS:
        for each in KINDS:
            if kind in (entry.name for entry in _entries(each)):
                raise FedveilError(f"'{kind}' is one of the {each}: fedveil list {each} {kind}")
        raise unknown_name("kind", kind, KINDS)
    if kind is not None and name is not None:
        _show_one(kind, name, as_json=as_json)
        return
    found = {each: _entries(each) for each in ([kind] if kind else KINDS)}
    if as_json:
        plain = {each: [_plain(entry) for entry in entries] for each, entries in found.items()}
        print(json.dumps(plain[kind] if kind else plain, indent=1, ensure_ascii=False))
        return
    width = shutil.get_terminal_size().columns
    for each, entries in found.items():
        if kind is None:
            print(f"{each}:")
        for entry in entries:
            print("\n".join(_shown(entry, max(len(each.name) for each in entries), width)))


def kinds_like(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def names_like(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """For the shell's completion: names of the kind given before."""
    kind = context.params.get("kind")
    return names_of(kind)(incomplete) if kind in REGISTRIES or kind == "suites" else []


def _show_one(kind: str, name: str, *, as_json: bool) -> None:
    entries = {entry.name: entry for entry in _entries(kind)}
    what = REGISTRIES[kind].kind if kind in REGISTRIES else kind.removesuffix("s")
    if ":" in name:
        raise FedveilError(f"give the name alone: fedveil list {kind} {name.partition(':')[0]}")
    if name not in entries:
        raise unknown_name(what, name, entries)
    fields = explained(REGISTRIES[kind].load(name)) if kind in REGISTRIES else []
    settings = _presets(kind, name)
    if as_json:
        listed = {"fields": [field.plain() for field in fields], "presets": settings} if kind in REGISTRIES else {}
        print(json.dumps({**_plain(entries[name]), **listed}, indent=1, ensure_ascii=False))
        return
    width = max(40, shutil.get_terminal_size().columns)
    print("\n".join(_shown(entries[name], len(name), width)).rstrip())
    for field in fields:
        default = "required" if field.required else f"default {_default(field.default)}"
        print(f"\n  {field.name}: {field.allowed}; {default}")
        print(textwrap.fill(field.explanation, width - 1, initial_indent="      ", subsequent_indent="      "))
    if kind in REGISTRIES and not fields:
        print("\n  It has no fields.")
    for each in settings:
        print(f"\n  preset {each['name']}: {each['spec']}")
        print(textwrap.fill(each["explanation"], width - 1, initial_indent="      ", subsequent_indent="      "))


def _presets(kind: str, name: str) -> list[dict[str, str]]:
    """The published settings of one thing, spelled as the command line takes them."""
    if kind not in REGISTRIES:
        return []
    found = presets(REGISTRIES[kind].load(name)).items()
    return [{"name": each, "spec": REGISTRIES[kind].spell(made), "explanation": words} for each, (made, words) in found]


def _default(value: Any) -> str:
    return "none" if value is None else spelled(value)


def _entries(kind: str) -> list[Entry]:
    if kind == "suites":
        return [Entry(each.name, "", _of_suite(each)) for each in SUITES.values()]
    if kind == "metrics":
        return [Entry(each.name, "", f"{each.words} Private: {each.private} values.") for each in METRICS.values()]
    return list(REGISTRIES[kind].entries().values())


def _of_suite(suite: Suite) -> str:
    """What a suite is for, and its attacks as `--attack` takes them."""
    stops = "Leaves out attacks on a question that is settled." if suite.stops else ""
    return " ".join(filter(None, (suite.summary, f"Attacks: {'; '.join(suite.attacks)}.", stops)))


def _facts(entry: Entry) -> dict[str, str]:
    """Place, guarantee and paper, as far as known without importing the class."""
    facts = {"place": "place", "promises": "guarantee", "paper": "paper"}
    return {fact: str(entry.constants[key]) for key, fact in facts.items() if entry.constants.get(key)}


def _plain(entry: Entry) -> dict[str, str]:
    return {"name": entry.name, "summary": entry.summary, **_facts(entry)}


def _shown(entry: Entry, indent: int, width: int) -> list[str]:
    """The name and what it does; below, where a defense acts, what it guarantees, and the paper."""
    facts = _facts(entry)
    place, guarantee, paper = (facts.get(key, "") for key in ("place", "guarantee", "paper"))
    acts = f"Acts at: {place}. " if place else ""
    below = [f"{acts}Guarantee: {guarantee}." if guarantee else acts, f"Paper: {paper}" if paper else ""]
    room = max(30, width - indent - 5)
    lines = [line for text in (entry.summary, *below) for line in textwrap.wrap(text, room, break_on_hyphens=False)]
    first, *others = lines or [""]
    gap = [""] if any(below) else []  # separates blocks of several lines
    return [f"  {entry.name.ljust(indent)}  {first}", *(" " * (indent + 4) + line for line in others), *gap]
