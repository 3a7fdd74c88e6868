"""Named tensors with a JSON header in one safetensors file, checked on reading: nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import safetensors
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedveil.errors import FedveilError, one_line
from fedveil.fields import problems
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tensors import read_safetensors, write_safetensors

KEY = "fedveil"  # the entry of the file's metadata that holds the header
# The format sorts its tensors. Their order matters: a defense draws its noise tensor by tensor.
ORDER = "fedveil.order"


class Header(BaseModel):
    """Base of the headers: what the file is, and the version of its layout."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: str
    version: int
    sha256: str | None = None  # the file's `seal`; one that was written elsewhere need not have it


H = TypeVar("H", bound=Header)


def write_tensors(path: Path, header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Write the file, with its seal, whole or not at all."""
    sealed = header.model_copy(update={"sha256": seal(header.model_dump_json(), tensors)})
    write_safetensors(path, tensors, {KEY: sealed.model_dump_json(), ORDER: json.dumps(list(tensors))})


def seal(header: str, tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of a file's header (JSON) and tensors in their order: the format would not notice a flipped bit."""
    said = {name: value for name, value in json.loads(header).items() if name != "sha256"}
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(f"{fingerprint(tensors.items())} {text}".encode()).hexdigest()


def read_tensors(path: Path, header: type[H], expected: str, version: int) -> tuple[H, dict[str, Tensor]]:
    """The header and all tensors, or one line that says what is wrong with the file."""
    what = expected.replace("-", " ")

    def accept(metadata: dict[str, str]) -> None:
        told = _parse(metadata)
        if told.get("format") != expected:
            raise FedveilError(f"{path} is not a {what}: its format is {told.get('format')!r:.40}, not '{expected}'")
        if told.get("version") != version:
            raise FedveilError(
                f"{path} is a {what} of version {told.get('version')!r:.40}; this fedveil reads version {version}"
            )

    try:
        metadata, found = read_safetensors(path, accept)
        read = header.model_validate_json(metadata[KEY])
        tensors = {name: found[name] for name in _order(metadata, list(found))}
        if read.sha256 is not None and read.sha256 != seal(metadata[KEY], tensors):
            raise FedveilError(f"{path} is damaged: its contents do not match their hash")
        return read, tensors
    except FileNotFoundError:
        raise FedveilError(f"there is no {what} at {path}") from None
    except pydantic.ValidationError as error:
        raise FedveilError(f"{path} is not a valid {what}: {problems(error)}") from None
    except (OSError, safetensors.SafetensorError, ValueError, RecursionError) as error:  # the last: nested too deeply
        raise FedveilError(f"{path} is damaged or not a {what}: {one_line(error)}") from None


def _parse(metadata: Mapping[str, str]) -> dict[str, Any]:
    header = json.loads(metadata.get(KEY, "{}"))  # a JSON error is a ValueError
    return header if isinstance(header, dict) else {}


def _order(metadata: Mapping[str, str], names: list[str]) -> list[str]:
    """The names in the order they were written in; a file from elsewhere need not tell it."""
    order = json.loads(metadata.get(ORDER, "null"))
    if order is None:
        return names
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(names):
        raise ValueError(f"its entry {ORDER} does not list its tensors")
    return [str(name) for name in order]


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under `prefix/name`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `prefixed`, for all prefixes at once. A name may itself hold slashes."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition("/")
        groups.setdefault(prefix, {})[rest] = tensor
    return groups
