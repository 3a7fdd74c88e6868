"""Taking the gradient of a sentence that was found off the update: what is left is that of the others alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from fedveil.attacks.scene import Public
from fedveil.attacks.sentence_fit import SentenceFit
from fedveil.attacks.text_layers import TextLayers

Gradient = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Peeled:
    """What is left of an update, and the label that a sentence had."""

    gradient: Gradient
    fit: SentenceFit
    label: int | None  # None where targets are tokens


def peeled(
    public: Public, fit: SentenceFit, gradient: Gradient, sentence: Tensor, batch_size: int, whole: SentenceFit
) -> Peeled | None:
    """The update without a sentence (places,): under the label with which the fewest directions are left.

    None where no label takes away as many directions as half of its tokens: then it was not in the batch, or a defense
    changed what it had sent.

    whole: the update before anything was taken off it.
    """
    length = int((sentence >= 0).sum())
    tries = []
    for label in range(public.classes) if public.target.kind == "class" and public.classes else [None]:
        own = sentence_gradient(public, fit.layers, gradient, sentence, label)
        rest = {**gradient, **{name: gradient[name] - each / batch_size for name, each in own.items()}}
        tries.append(Peeled(rest, SentenceFit.of(fit.layers, rest, left_of=whole), label))
    best = min(tries, key=lambda each: each.fit.rank)
    return best if fit.rank - best.fit.rank >= length / 2 else None


def sentence_gradient(
    public: Public, layers: TextLayers, gradient: Gradient, sentence: Tensor, label: int | None
) -> dict[str, Tensor]:
    """The gradient that one sentence would have, of the layers that are looked at."""
    names = [name for name in layers.watched if name in gradient]
    weights = {name: tensor.clone().requires_grad_(name in names) for name, tensor in layers.weights.items()}
    with torch.enable_grad():
        scores = functional_call(layers.model, weights, (), layers.form.inputs(sentence[None]))
        targets = sentence[None].long() if label is None else torch.tensor([label])
        if label is None:
            targets = targets.masked_fill(targets < 0, -100)
        loss = public.loss(scores, targets)
        found = torch.autograd.grad(loss, [weights[name] for name in names])
    return dict(zip(names, found, strict=True))
