"""What left a site, in fedveil's capture files: for the site's own audit of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants

from fedveil.clients.engine import Tensors
from fedveil.defenses.base import MessageKind
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import capture
from fedveil.files import private_folder

NEEDED = {"folder", "lr", "batch_sizes"}
TAKEN = NEEDED | {"momentum", "facts"}


def check_captures(told: Any) -> dict[str, Any]:
    """What `captures=` was given; settings that no capture can be made of are refused."""
    if not isinstance(told, Mapping) or not NEEDED <= told.keys() <= TAKEN:
        raise FedveilError(
            f"captures is a dict of {', '.join(sorted(NEEDED))} and, if need be, {', '.join(sorted(TAKEN - NEEDED))}"
        )
    return dict(told)


def write_capture(
    told: Mapping[str, Any],
    kind: MessageKind,
    before: Tensors,
    shown: Tensors,
    chain: Chain,
    shareable: Shareable,
    fl_ctx: FLContext,
) -> Path:
    """Keep an update as it left, with what is public of the training behind it."""
    settings = {name: value for name, value in told.items() if name != "folder"}
    facts = {"defense": str(chain), "buffers": "local", **(settings.pop("facts", None) or {})}
    seen = capture(before, shown, kind=kind, facts=facts, **settings)
    site = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in str(fl_ctx.get_identity_name()))
    number = shareable.get_header(AppConstants.CURRENT_ROUND)
    number = number + 1 if isinstance(number, int) else 1  # NVFlare counts from 0
    path = private_folder(Path(told["folder"])) / f"round-{number:04}-{site}.safetensors"
    seen.save(path)
    return path
