"""What may go out beside the arrays of a result: few numbers, each of them checked. All else is left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nvflare.apis.dxo import DXO, MetaKey
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants

from fedveil.errors import FedveilError

MOST = 10**9  # of a count
ROUNDS = (AppConstants.START_ROUND, AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS)
CODES = {value for name, value in vars(ReturnCode).items() if name.isupper()}


def metrics(given: Any, allowed: Sequence[str], digits: int) -> dict[str, float]:
    """Of all metrics the single numbers that are allowed, rounded."""
    kept = {}
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if name in allowed:
            kept[name] = _rounded(name, value, digits)
    return dict(sorted(kept.items()))  # in an order that tells nothing


def meta(dxo: DXO, allowed: Sequence[str], digits: int) -> dict[str, Any]:
    """What the server needs to know of an update: how many steps are behind it, and metrics that are allowed."""
    if dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM):
        raise FedveilError("it was encrypted or compressed before: the filter that protects must come first")
    kept: dict[str, Any] = {}
    steps = dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND)
    if steps is not None:
        kept[MetaKey.NUM_STEPS_CURRENT_ROUND] = _count(MetaKey.NUM_STEPS_CURRENT_ROUND, steps)
    told = metrics(dxo.get_meta_prop(MetaKey.INITIAL_METRICS), allowed, digits)
    if told:
        kept[MetaKey.INITIAL_METRICS] = told
    return kept


def fresh(shareable: Shareable, dxo: DXO) -> Shareable:
    """A message with that content, and of the old one the numbers of the round alone."""
    made: Shareable = dxo.to_shareable()
    for key in ROUNDS:
        value = shareable.get_header(key)
        if value is not None:
            made.set_header(key, _count(key, value))
    return made


def failure(code: Any) -> Shareable:
    """The reply of a task that failed: its code and nothing else."""
    made: Shareable = make_reply(code if code in CODES else ReturnCode.EXECUTION_EXCEPTION)
    return made


def _rounded(name: str, value: Any, digits: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise FedveilError(f"the metric {name} is not a single finite number")
    return float(f"{number:.{digits - 1}e}")


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or not 0 <= value <= MOST:
        raise FedveilError(f"{name} is not a whole number between 0 and {MOST:,}")
    return int(value)
