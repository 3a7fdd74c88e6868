"""Putting clients together."""

import torch

from fedveil.clients.nested import stack


def test_rows_are_stacked():
    for count in (1, 2, 5):
        rows = [
            ({"w": torch.full((2, 3), float(k)), "b": torch.tensor(k)}, torch.tensor(0.5 * k), {}) for k in range(count)
        ]
        expected = (
            {"w": torch.arange(float(count))[:, None, None].expand(count, 2, 3), "b": torch.arange(count)},
            0.5 * torch.arange(count),
            {},
        )
        torch.testing.assert_close(stack(iter(rows)), expected, rtol=0, atol=0)
