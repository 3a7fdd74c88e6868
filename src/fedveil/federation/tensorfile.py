"""Named tensors with a JSON header in one safetensors file, checked on reading: nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.fields import problems
from fedveil.files import write_atomically

KEY = "fedveil"  # the entry of the file's metadata that holds the header
# The format sorts its tensors. Their order matters: a defense draws its noise tensor by tensor.
ORDER = "fedveil.order"


class Header(BaseModel):
    """Base of the headers: what the file is, and the version of its layout."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: str
    version: int


H = TypeVar("H", bound=Header)


def write_tensors(path: Path, header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Write the file whole or not at all."""
    # Clones: rows of one stacked tensor share their memory, which the format does not allow.
    apart = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    content = safetensors.torch.save(apart, metadata={KEY: header.model_dump_json(), ORDER: json.dumps(list(apart))})
    write_atomically(path, content)


def read_tensors(path: Path, header: type[H], expected: str, version: int) -> tuple[H, dict[str, Tensor]]:
    """The header and all tensors, or one line that says what is wrong with the file."""
    what = expected.replace("-", " ")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            found = _parse(metadata)
            if found.get("format") != expected:
                found_format = f"{found.get('format')!r:.40}"
                raise FedveilError(f"{path} is not a {what}: its format is {found_format}, not '{expected}'")
            if found.get("version") != version:
                raise FedveilError(
                    f"{path} is a {what} of version {found.get('version')!r:.40}; this fedveil reads version {version}"
                )
            tensors = {name: file.get_tensor(name) for name in _order(metadata, file.keys())}
        return header.model_validate_json(metadata[KEY]), tensors
    except FileNotFoundError:
        raise FedveilError(f"there is no {what} at {path}") from None
    except pydantic.ValidationError as error:
        raise FedveilError(f"{path} is not a valid {what}: {problems(error)}") from None
    except (OSError, safetensors.SafetensorError, ValueError, RecursionError) as error:  # the last: nested too deeply
        reason = str(error).strip().partition("\n")[0][:200]
        raise FedveilError(f"{path} is damaged or not a {what}: {reason}") from None


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
