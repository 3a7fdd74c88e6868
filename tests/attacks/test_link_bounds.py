"""What a formal guarantee allows is never exceeded by the link test, and a mechanism with too little noise is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedveil.attacks.link import LinkTest
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure
from fedveil.leakage.intervals import Interval, bootstrap
from fedveil.ledger.picking import gaussian_bound, most_picked
from fedveil.ledger.statement import statement

from .linking import scene_at_choice

VICTIMS = 250
RELEASE = Exposure(parameters=8, rounds=1, steps_per_round=1, sampling_rate=1.0)


def allowed(spec: str, among: int) -> float:
    found = most_picked(statement(Chain.of(spec), RELEASE), RELEASE, among)
    assert found is not None
    return found


def opposite() -> Tensor:
    """Two updates as far from each other as a norm of 1 allows: (N, B, d)."""
    return torch.eye(8)[:1].mul(torch.tensor([[1.0], [-1.0]]))[:, None] * 5  # clipped to 1


def apart(among: int = 8) -> Tensor:
    """Several at right angles."""
    return torch.eye(8)[:among, None] * 5


def one_of_three(among: int = 2) -> Tensor:
    """Batches that differ in one example; all know the others."""
    rest = torch.full((among, 2, 8), 0.1)
    return torch.cat([rest[:, :1], opposite()[:among], rest[:, 1:]], dim=1)


def linked(spec: str, acting: str, rows: Tensor, kind: str = "gradient") -> Interval:
    scene, place = scene_at_choice(Chain.of(spec), Chain.of(acting), rows, VICTIMS, kind)
    found = LinkTest().run(scene)
    assert found.exact.all()
    return bootstrap(found.linked(place).numpy())


# The mechanism, the same with a quarter of its noise, the candidates, and what is sent.
MECHANISMS = [
    ("dp-clip:clip=1,sigma=1", "dp-clip:clip=1,sigma=0.25", opposite(), "gradient"),
    ("dp-clip:clip=1,sigma=1,at=upload", "dp-clip:clip=1,sigma=0.25,at=upload", opposite(), "delta"),
    ("dp-clip:clip=1,sigma=1", "dp-clip:clip=1,sigma=0.25", apart(), "gradient"),
    ("dp-gaussian:epsilon=4,delta=0.1", "dp-clip:clip=1,sigma=0.24", opposite(), "gradient"),
    ("dp-laplace:epsilon=2", "dp-laplace:epsilon=8", opposite(), "gradient"),
    ("dp-laplace:epsilon=2,at=upload", "dp-laplace:epsilon=8,at=upload", opposite(), "delta"),
    ("dp-sgd:noise_multiplier=1", "dp-sgd:noise_multiplier=0.25", one_of_three(), "gradient"),
    ("dp-sgd:noise_multiplier=1", "dp-sgd:noise_multiplier=0.25", one_of_three(), "weights"),
]


@pytest.mark.parametrize("spec, broken, rows, kind", MECHANISMS)
def test_no_more_is_linked_than_the_guarantee_allows(spec: str, broken: str, rows: Tensor, kind: str) -> None:
    bound = allowed(spec, len(rows))
    found = linked(spec, spec, rows, kind)
    assert found.low <= bound < 1
    assert found.low > 1.2 / len(rows)  # it links at all
    assert linked(spec, broken, rows, kind).low > bound  # a bound that too little noise does break


def test_half_the_noise_is_found_where_the_bound_is_tight() -> None:
    """Whatever is clipped lies within 1 of zero: so half of the greatest distance of two bounds the best pick."""
    spec = "dp-clip:clip=1,sigma=1"
    tight = gaussian_bound(1.0, 2)
    found = linked(spec, spec, opposite())
    assert found.low <= tight <= found.high  # reached
    assert tight < allowed(spec, 2)
    assert linked(spec, "dp-clip:clip=1,sigma=0.5", opposite()).low > tight
