"""Stacking as rows come: what `torch.stack` gives, and one row's memory at a time."""

import weakref

import torch

from fedveil.clients.nested import stack_one_by_one, zip_nested


def rows(count):
    return [
        ({"w": torch.full((2, 3), float(k)), "b": torch.tensor(k)}, torch.tensor(0.5 * k), {}) for k in range(count)
    ]


def test_rows_are_stacked():
    for count in (1, 2, 5):
        found, expected = stack_one_by_one(iter(rows(count)), count), zip_nested(torch.stack, rows(count))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_row_is_gone_before_the_next_is_made():
    before: list[weakref.ref[torch.Tensor]] = []

    class Rows:
        """An iterator that keeps nothing, as `map` does."""

        def __init__(self):
            self.k = 0

        def __iter__(self):
            return self

        def __next__(self):
            assert all(ref() is None for ref in before)
            row = torch.full((3,), float(self.k))
            before.append(weakref.ref(row))
            self.k += 1
            return {"w": row}

    stacked = stack_one_by_one(Rows(), 4)
    assert stacked["w"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
