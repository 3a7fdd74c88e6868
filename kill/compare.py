"""Compare two folders of a run bit for bit, except for dates and times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import load_result

# Keys of times. `sha256` in a header covers times too; the contents that it covers are compared themselves.
TIMES = re.compile(r"seconds|slowdown|^started$|^sha256$")
SLOWER = re.compile(r"; a round takes .*")  # the end of the verdict's sentence on the cost


def differences(folder: Path, whole: Path) -> list[str]:
    """What differs from an uninterrupted run, including hidden files."""
    names, expected = _files(folder), _files(whole)
    found = [f"{name} is missing" for name in sorted(expected - names)]
    found += [f"{name} is left over" for name in sorted(names - expected)]
    return found + [name for name in sorted(names & expected) if _content(folder / name) != _content(whole / name)]


def rounds(folder: Path) -> int:
    """The number of rounds of training in the checkpoints of a folder."""
    return sum(len(_told(_tensors(path)[0])["history"]) for path in folder.rglob("checkpoint.safetensors"))


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _content(path: Path) -> object:
    if path.suffix == ".json":
        return _timeless(json.loads(path.read_bytes()))
    if path.suffix == ".safetensors":
        header, tensors = _tensors(path)
        return _timeless(header), tensors
    if path.name == "report.html":
        # It contains times, so compare it with a report made again from the result beside it.
        again = path.with_name("again.html")
        try:
            AuditResult(*load_result(path.parent)).report(again)
            return "as its result" if again.read_bytes() == path.read_bytes() else path
        finally:
            again.unlink(missing_ok=True)
    if path.name == "config.toml":  # says where its store lies
        return [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("store = ")]
    return path.read_bytes()


def _tensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the bytes of all tensors."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _told(header: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(header["__metadata__"]["fedveil"])
    return told


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if not TIMES.search(key)}
    if isinstance(value, list):
        return [_timeless(item) for item in value]
    if isinstance(value, str) and value.startswith("{"):
        return _timeless(json.loads(value))
    return SLOWER.sub("", value) if isinstance(value, str) else value
