"""Whether the Flower that is installed is built as a site's seams in it need: they lean on private names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from types import ModuleType
from typing import Any

from fedveil.errors import FedveilError

TESTED = ((1, 41), (1, 43))  # from, and below


def check_built(
    where: ModuleType,
    main: Callable[..., Any],
    needed: Mapping[str, Iterable[str]],
    more: Callable[[], str | None] = lambda: None,
) -> None:
    """Refuse a Flower of another version, or one in which `main` does not call these functions with these parameters.

    more: what else is looked at; it returns what is wrong.
    """
    installed = version("flwr")
    wrong = _wrong_version(installed) or _wrong_names(where, main, needed) or more() or _calls_home()
    if wrong:
        raise FedveilError(
            f"the site's policy cannot be enforced in Flower {installed}: {wrong}; install 'flwr>=1.41,<1.43'"
        )


def stay_quiet() -> None:
    """Switch Flower's telemetry off in this process, which may have read its environment before we could set it."""
    from flwr.supercore import telemetry

    telemetry.FLWR_TELEMETRY_ENABLED = "0"


def _wrong_version(installed: str) -> str | None:
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    return None if TESTED[0] <= numbers < TESTED[1] else "it was never tested with this version"


def _wrong_names(where: ModuleType, main: Callable[..., Any], needed: Mapping[str, Iterable[str]]) -> str | None:
    for name, parameters in needed.items():
        found = getattr(where, name, None)
        if found is None or not set(parameters) <= inspect.signature(found).parameters.keys():
            return f"it has no {name} with {', '.join(sorted(parameters))}"
        if f"{name}(" not in inspect.getsource(main):
            return f"its {main.__name__} does not call {name}"
    return None


def _calls_home() -> str | None:
    from flwr.supercore import telemetry

    if not hasattr(telemetry, "FLWR_TELEMETRY_ENABLED") or "FLWR_TELEMETRY_ENABLED" not in inspect.getsource(
        telemetry.create_event
    ):
        return "its telemetry cannot be switched off"
    return None
