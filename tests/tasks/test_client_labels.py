"""How unlike the clients are: one number, and what chance alone would give."""

from __future__ import annotations

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom

from fedveil.tasks.client_labels import ClientLabels, _mean_deviation
from fedveil.tasks.task import client_labels, client_labels_of, task


def held(counts: list[list[int]], **more: object) -> ClientLabels:
    names = [str(number) for number in range(len(counts[0]))]
    return ClientLabels.model_validate({"labels": names, "sizes": list(map(sum, counts)), "counts": counts, **more})


def test_the_distance_goes_from_alike_to_apart() -> None:
    assert held([[5, 5], [50, 50]]).distance == 0
    # Ten clients with a class each: every one lacks nine tenths of what there is.
    assert held((np.eye(10, dtype=int) * 7).tolist()).distance == pytest.approx(0.9)
    assert held([[3, 1], [1, 3]]).distance == pytest.approx(0.25)


@settings(deadline=None)
@given(st.integers(1, 60), st.data())
def test_chance_is_the_mean_deviation_of_a_hypergeometric_draw(every: int, data: st.DataObject) -> None:
    marked, drawn = data.draw(st.integers(0, every)), data.draw(st.integers(1, every))
    draw = hypergeom(every, marked, drawn)
    values = np.arange(drawn + 1)
    exact = float((np.abs(values - draw.mean()) * draw.pmf(values)).sum())
    assert _mean_deviation(every, marked, drawn) == pytest.approx(exact, abs=1e-9)


def test_labels_dealt_at_random_are_as_far_apart_as_chance_says() -> None:
    found = [client_labels_of("digits", clients=20, seed=seed) for seed in range(10)]
    measured = np.mean([one.distance for one in found])
    assert measured == pytest.approx(np.mean([one.distance_by_chance for one in found]), rel=0.05)
    uneven = client_labels_of("digits", clients=20, partition="dirichlet:alpha=0.1")
    assert uneven.distance > 2 * uneven.distance_by_chance


def test_clients_without_any_label_are_left_out() -> None:
    mixed = ClientLabels(labels=["a", "b"], sizes=[4, 4, 2], counts=[[3, 3], [1, 1], [0, 0]], several=True)
    assert mixed.distance == 0
    assert mixed.labels_per_client == pytest.approx(4 / 3)
    nothing = ClientLabels(labels=["a"], sizes=[2], counts=[[0]], several=True)
    assert (nothing.distance, nothing.distance_by_chance) == (0, 0)


@pytest.mark.parametrize("counts, sizes", [([[1, 2]], [3, 3]), ([[1], [2]], [1, 2]), ([[1, -1]], [1]), ([], [])])
def test_counts_that_do_not_belong_together_are_refused(counts: list[list[int]], sizes: list[int]) -> None:
    with pytest.raises(pydantic.ValidationError):
        ClientLabels(labels=["a", "b"], sizes=sizes, counts=counts)


def test_with_and_without_a_model_it_is_the_same() -> None:
    chosen = {"clients": 7, "partition": "dirichlet:alpha=0.3", "split": "80/20", "seed": 5, "limit": 300}
    assert client_labels_of("digits", **chosen) == client_labels(task("digits", model="mlp", **chosen))  # type: ignore[arg-type]
