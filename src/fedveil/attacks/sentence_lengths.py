"""How many tokens sentences have, read off an update: the rank of the first attention layer's gradient counts them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.attacks.scene import Scene
from fedveil.attacks.span import Span
from fedveil.attacks.text_layers import TextLayers


def read_lengths(scene: Scene) -> Tensor:
    """The tokens (V, B) of each sentence, special ones included: of a batch, all sentences alike.

    Each token at its place gives the first attention layer a vector of its own, and the gradient's rows lie in their
    span. What begins every sentence is the same in all of them, and counts once.
    """
    layers = TextLayers(scene.public, scene.updates.before.rows([0]))
    before, behind = layers.form.ends
    group, size = layers.groups[0], scene.batch_size
    found = []
    for victim in range(scene.count):
        gradient = scene.updates.gradient.row(victim)
        rank = Span.of(group.rows(gradient)[:, :-1]).rank
        tokens = rank + (size - 1) * len(before)
        found.append(torch.full((size,), round(tokens / size)))
    return torch.stack(found).clamp(len(before) + len(behind) + 1, layers.form.length)
