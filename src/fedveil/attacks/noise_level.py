"""How much noise is in an update, told from the update alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedveil.defenses.updates import Updates

NONE = 1e-3  # of the size of an entry: noise below this is rounding


def linear_layers(model: nn.Module, updates: Updates) -> list[str]:
    """The weights of linear layers whose gradients, without noise, would not have full rank."""
    found = []
    for name, module in model.named_modules():
        weight = f"{name}.weight".removeprefix(".")
        if isinstance(module, nn.Linear) and weight in updates.before:
            rows, columns = updates.before[weight].shape[1:]
            if min(rows, columns) > most_rank(updates):
                found.append(weight)
    return found


def most_rank(updates: Updates) -> int:
    """The greatest rank that the gradient of a linear layer can have: each example of each step adds one."""
    return sum(updates.batch_sizes)


def noise_beyond_rank(gradient: Tensor, rank: int) -> float:
    """The spread of noise on every entry of a matrix (m, n) that has at most this rank without it.

    All of the matrix is within `rank` singular values, and noise is spread over all of them: of its m·n variances,
    (m − rank)·(n − rank) are left beyond. 0 if what is left is no more than rounding.
    """
    matrix = gradient.double()
    values = torch.linalg.svdvals(matrix)
    room = (matrix.shape[0] - rank) * (matrix.shape[1] - rank)
    sigma = float(values[rank:].square().sum() / room) ** 0.5
    return sigma if sigma > NONE * float(matrix.square().mean().sqrt()) else 0.0
