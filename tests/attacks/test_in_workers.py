"""Victims shared out among worker processes: what comes back, in which order, and when it is worth it."""

from dataclasses import replace

import pytest
import torch

from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.defenses.base import StepsBefore
from fedveil.registry import defenses
from fedveil.workers import Workers

from .small import SMOOTH, digits


@pytest.fixture(scope="module")
def pool():
    with Workers(2) as workers:
        yield workers


def assert_same(found, expected):
    assert torch.equal(found.labels, expected.labels)
    assert found.steps == expected.steps
    torch.testing.assert_close(found.cost, expected.cost, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.iterates[0], expected.iterates[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("same_weights", [True, False])
def test_an_attack_finds_the_same_with_workers(pool, same_weights):
    problem = digits(SMOOTH, victims=5, same_weights=same_weights)[2]
    # Few small steps of the plain gradient: the last bits do not grow into other pictures.
    attack = InvertingGradients(steps=20, signed=False, lr=0.01, restarts=1)
    told = []
    found = attack.run(problem, backend="stacked", workers=pool, progress=lambda *step: told.append(step))
    assert_same(found, attack.run(problem, backend="stacked"))
    assert told[-1] == (40, 40)  # two parts of 20 steps
    assert len(told) == 40


def test_what_a_defense_replays_travels_too(pool):
    problem = digits(SMOOTH, victims=3)[2]
    simulated = replace(problem, simulate=(defenses.parse("fedem").simulate,), before=(StepsBefore(1, 0.1),))
    attack = InvertingGradients(steps=5, signed=False, lr=0.01, restarts=1)
    assert_same(attack.run(simulated, backend="loop", workers=pool), attack.run(simulated, backend="loop"))


def test_short_work_stays_in_this_process(monkeypatch):
    workers = Workers(2, least_seconds=20)
    monkeypatch.setattr(workers, "map", lambda *given: pytest.fail("processes were started"))
    InvertingGradients(steps=3, restarts=1).run(digits(SMOOTH, victims=2)[2], workers=workers)
    with pytest.raises(pytest.fail.Exception):
        InvertingGradients(steps=1_000_000, restarts=1).run(digits(SMOOTH, victims=2)[2], workers=workers)
