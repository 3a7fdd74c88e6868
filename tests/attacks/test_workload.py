"""What an attack is predicted to take, and whether compiling it is worth it."""

import pytest

from fedveil.attacks import workload
from fedveil.attacks.inverting_gradients import InvertingGradients

from .test_matching import image_problem

PHOTOGRAPH = 3_627_124_736  # operations of ResNet-18 on one picture of 224 pixels


def short(steps):
    return InvertingGradients(steps=steps, restarts=1, polish=0).recipe()


def test_few_steps_on_a_large_picture_are_not_compiled_and_many_are(monkeypatch):
    """Measured there: 0.35 s for a step, 0.20 s compiled, 110 s to compile."""
    problem = image_problem(victims=1)
    monkeypatch.setattr(workload, "forward_operations", lambda problem: PHOTOGRAPH)
    assert workload.chunk_seconds(problem, short(100), 1) == pytest.approx(35, rel=0.1)
    assert not workload.worth_compiling(problem, short(30), 1)
    assert not workload.worth_compiling(problem, short(200), 1)
    assert workload.worth_compiling(problem, short(1600), 1)


def test_small_models_are_predicted_by_the_speed_of_small_models(monkeypatch):
    problem = image_problem(victims=1)
    monkeypatch.setattr(workload, "forward_operations", lambda problem: 10**6)
    assert not workload.worth_compiling(problem, short(1000), 4)
    assert workload.worth_compiling(problem, short(6000), 4)
    assert workload.chunk_seconds(problem, short(1000), 4) == pytest.approx(1000 * (2e-3 + 4 * 8 * 10**6 / 8e9))
