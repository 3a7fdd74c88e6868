"""Whether two folders of a run hold the same: bit for bit, but for dates and times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import load_result

# Keys that hold times. `sha256` in a header seals times too; the contents that it seals are compared themselves.
TIMES = re.compile(r"seconds|slowdown|^started$|^sha256$")
SLOWER = re.compile(r"; a round takes .*")  # the end of the verdict's sentence on the cost


def differences(folder: Path, whole: Path) -> list[str]:
    """What differs from an uninterrupted run, hidden files too."""
    names, expected = _files(folder), _files(whole)
    found = [f"{name} is missing" for name in sorted(expected - names)]
    found += [f"{name} is left over" for name in sorted(names - expected)]
    return found + [name for name in sorted(names & expected) if _content(folder / name) != _content(whole / name)]


def rounds(folder: Path) -> int:
    """How many rounds of training the checkpoints in a folder tell of."""
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
        # It shows times: it must be what the result beside it makes.
        again = path.with_name("again.html")
        try:
            AuditResult(*load_result(path.parent)).report(again)
            return "as its result" if again.read_bytes() == path.read_bytes() else path
        finally:
            again.unlink(missing_ok=True)
    return path.read_bytes()


def _tensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and all tensors as they lie behind it."""
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
