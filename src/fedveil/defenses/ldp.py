"""What the mechanisms of local differential privacy share: exact draws, and what ε per entry comes to over a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedveil.defenses.base import Facts
from fedveil.defenses.guarantee import Exposure, Guarantee, PureLDP
from fedveil.streams import Streams
from fedveil.tree import Tree

# Below this the noise is beyond any use, and its moments leave the range of numbers.
Epsilon = Annotated[float, Field(ge=1e-9, allow_inf_nan=False)]
_LARGE = 10.0  # a composed ε above this is called what it is: at 10, odds may change by a factor of 22,000


def randomized(update: Tree, mechanism: Callable[[Tensor], Tensor]) -> Tree:
    """The mechanism on every floating tensor, in double precision on the CPU; the result in the tensor's own type.

    Draws in single precision are multiples of 2^-24: a sign that must flip with probability e^-ε would never do so
    from ε = 17 on, and the likelihood ratio would be infinite. NaN and infinity pass, for the server to refuse.
    """

    def apply(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        drawn = mechanism(tensor.cpu().double()).to(tensor.dtype).to(tensor.device)
        return torch.where(torch.isfinite(tensor), drawn, tensor)

    return update.map(apply)


def happens(probability: Tensor | float, streams: Streams, like: Tensor) -> Tensor:
    """Events of a small probability, one for every entry.

    A draw of 0 counts as the event, so that it happens with at least its probability, however small that is.
    """
    return streams.uniform(*like.shape[1:], dtype=torch.float64) < probability


def per_coordinate(epsilon: float, exposure: Exposure, *, each: str, protects: str, remark: str) -> Guarantee:
    """ε of one entry in one release, and beside it what it comes to over all entries and releases of a client.

    The remark says what is covered or not; it must stand wherever the number does.
    """
    total = epsilon * exposure.parameters * exposure.releases
    unit = "round" if exposure.steps_per_round == 1 else "update"
    verdict = ", which is no protection" if total > _LARGE else ""
    sentence = (
        f"Formal guarantee: ε = {epsilon:g} per {each} and {unit}; composed over {exposure.parameters:,} entries and "
        f"{exposure.releases:,} {unit}s: ε = {_short(total)}{verdict}; {remark}."
    )
    mechanism = PureLDP(epsilon, coordinates=exposure.parameters)
    caveat = f"{remark[0].upper()}{remark[1:]}."
    return Guarantee(sentence, formal=True, protects=protects, mechanism=mechanism, caveat=caveat)


def _short(number: float) -> str:
    """Two or three digits: 0.25, 3,050 and 3.1e6."""
    if number < 1e4:
        return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{number:.1e}".replace("e+0", "e").replace("e+", "e")


def step_scale(facts: Facts) -> float:
    """What the attacker divided the change of the weights by; exact without momentum, which is not among the facts."""
    return 1.0 if facts.kind == "gradient" else facts.lr * facts.steps


def precision_measures(range_factor: float, deviation: float, reach: float) -> dict[str, float]:
    """How rough an unbiased mechanism is: for the report."""
    return {
        "range factor C": range_factor,
        "predicted standard deviation of an entry": deviation,
        "clients whose mean has a standard deviation of a tenth of the range": (deviation / (0.1 * reach)) ** 2,
    }
