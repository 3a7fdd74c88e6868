from __future__ import annotations

import pytest
import torch

from fedveil.errors import FedveilError
from fedveil.tasks.inputs import as_arguments, count, leaf, map_inputs, take, with_leaf

ONE = torch.arange(12.0).reshape(4, 3)
TWO = {"ids": torch.arange(8).reshape(4, 2), "mask": torch.ones(4, 2)}


def test_leaf_names_one_part() -> None:
    assert leaf(ONE, None) is ONE
    assert leaf(TWO, "mask") is TWO["mask"]


@pytest.mark.parametrize(
    "inputs, name, line",
    [(ONE, "mask", "one tensor"), (TWO, None, "name one of ids, mask"), (TWO, "msk", "no part 'msk'")],
)
def test_leaf_says_which_names_there_are(inputs: object, name: str | None, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        leaf(inputs, name)  # type: ignore[arg-type]


def test_with_leaf_replaces_one_part_and_keeps_the_given_inputs() -> None:
    changed = with_leaf(TWO, "mask", torch.zeros(4, 2))
    assert isinstance(changed, dict)
    assert changed["ids"] is TWO["ids"]
    assert changed["mask"].sum() == 0
    assert TWO["mask"].sum() == 8
    assert with_leaf(ONE, None, 2 * ONE).equal(2 * ONE)  # type: ignore[union-attr]
    with pytest.raises(FedveilError):
        with_leaf(TWO, "other", ONE)


def test_count_is_the_shared_first_axis() -> None:
    assert count(ONE) == count(TWO) == 4
    for uneven in ({"a": torch.ones(2), "b": torch.ones(3)}, {}, torch.tensor(1.0)):
        with pytest.raises(FedveilError, match="first axis"):
            count(uneven)


@pytest.mark.parametrize("index", [[2, 0], (2, 0), torch.tensor([2, 0])])
def test_take_keeps_parts_together(index: object) -> None:
    taken = take(TWO, index)  # type: ignore[arg-type]
    assert isinstance(taken, dict)
    assert taken["ids"].tolist() == [[4, 5], [0, 1]]
    assert taken["mask"].shape == (2, 2)
    assert leaf(take(ONE, slice(1, 2)), None).tolist() == [[3.0, 4.0, 5.0]]


def test_map_reaches_every_part() -> None:
    doubled = map_inputs(lambda tensor: 2 * tensor, TWO)
    assert leaf(doubled, "ids").equal(2 * TWO["ids"])
    assert leaf(doubled, "mask").equal(2 * TWO["mask"])


def test_one_tensor_goes_by_position_and_parts_by_keyword() -> None:
    assert as_arguments(ONE) == ((ONE,), {})
    arguments, keywords = as_arguments(TWO)
    assert arguments == ()
    assert keywords.keys() == TWO.keys()
