"""Taking clients apart and putting them together."""

import torch

from fedveil.clients.nested import stack, unstack


def rows(count):
    return [
        ({"w": torch.full((2, 3), float(k)), "b": torch.tensor(k)}, torch.tensor(0.5 * k), {}) for k in range(count)
    ]


def test_rows_are_stacked_and_taken_apart():
    for count in (1, 2, 5):
        stacked = stack(iter(rows(count)))
        expected = (
            {"w": torch.arange(float(count))[:, None, None].expand(count, 2, 3), "b": torch.arange(count)},
            0.5 * torch.arange(count),
            {},
        )
        torch.testing.assert_close(stacked, expected, rtol=0, atol=0)
        torch.testing.assert_close(unstack(stacked, count), rows(count), rtol=0, atol=0)


def test_clients_are_taken_apart_without_copies():
    stacked = {"w": torch.zeros(3, 2)}
    unstack(stacked, 3)[1]["w"].fill_(1)
    assert stacked["w"].tolist() == [[0, 0], [1, 1], [0, 0]]
