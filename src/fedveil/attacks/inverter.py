"""The network of LTI: from the features of an update to the pictures of its batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.attacks.networks import Weights, dense, through
from fedveil.attacks.practice import Batches
from fedveil.attacks.priors import Box
from fedveil.streams import Streams

GATES = 1.0  # spread of the gates at the start: classes have to see different parts of the first layer
QUIET = 0.1  # size of what the hidden layers add at the start, in parts of what they would


@dataclass(frozen=True, eq=False)
class Inverter:
    """A network of two hidden layers, as a function of its weights.

    Every picture of a batch is asked for by what is known of it: its label, which labels the batch has, and its number
    among those of its label. That gates and shifts the first layer. Beside the hidden layers there is a linear way from
    the gated features to the pixels, and what comes out is added to the mean picture of the label.

    plain: as LTI was published, all pictures of a batch at once, of the features alone.
    """

    plain: bool
    size: int  # pictures of a batch
    classes: int  # 0: labels are not used
    box: Box | None  # the valid range of a pixel, which the published network keeps

    def drawn(self, features: int, pixels: int, width: int, streams: Streams) -> Weights:
        """Weights to start from."""
        first, second = dense("first", features, width, streams), dense("second", width, width, streams)
        if self.plain:
            return {**first, **second, **dense("last", width, self.size * pixels, streams)}
        asked = self._asked(torch.zeros(1, self.size, dtype=torch.int64)).shape[-1]
        return {
            **first,
            **second,
            **dense("last", width, pixels, streams, QUIET),
            "skip": dense("skip", width, pixels, streams, QUIET)["skip.weight"],
            "gate": GATES * streams.fold("gate").normal(asked, width)[0],
            "shift": torch.zeros(asked, width),
        }

    def __call__(self, weights: Weights, rows: Tensor, labels: Tensor, means: Tensor) -> Tensor:
        """The pictures (K, B, pixels) of updates with features (K, d) and labels (K, B).

        Labels are sorted within each batch. means: (C, pixels) of each class, or (1, pixels) of all pictures.
        """
        if self.plain:
            hidden = F.relu(through(weights, "second", F.relu(through(weights, "first", rows))))
            return self._within(through(weights, "last", hidden).reshape(len(rows), self.size, -1))
        asked = self._asked(labels)
        gated = through(weights, "first", rows)[:, None] * (1 + asked @ weights["gate"])
        hidden = F.gelu(through(weights, "second", F.gelu(gated + asked @ weights["shift"])))
        own = means[labels] if self.classes else means.mean(0)
        return own + through(weights, "last", hidden) + F.linear(gated, weights["skip"])

    def _asked(self, labels: Tensor) -> Tensor:
        """What is known of every picture of sorted batches, as zeros and ones, and counts: (K, B, q)."""
        if not self.classes:
            return torch.eye(self.size).expand(len(labels), -1, -1)
        own = F.one_hot(labels, self.classes).float()
        if self.size == 1:
            return own
        alike = labels[:, :, None] == labels[:, None, :]
        number = F.one_hot(alike.tril(-1).sum(2), self.size).float()
        return torch.cat([own, own.mean(1, keepdim=True).expand_as(own), number], 2)

    def _within(self, values: Tensor) -> Tensor:
        """Numbers squeezed into the valid range of pixels, if there is one."""
        if self.box is None:
            return values
        low, high = (_for_pixels(bound, values) for bound in self.box)
        return low + (high - low) * torch.sigmoid(values)


def _for_pixels(bound: Tensor, values: Tensor) -> Tensor:
    """A bound of every channel (C, 1, 1), or one number, for flat pictures."""
    flat = bound.flatten().to(values)
    return flat.repeat_interleave(values.shape[-1] // len(flat))


def mean_pictures(train: Batches, classes: int) -> Tensor:
    """The mean picture of every class (C, pixels); where a class has none, or there are no classes, that of all."""
    flat, labels = train.inputs.flatten(0, 1).flatten(1).float(), train.labels.flatten()
    own = [flat[labels == label] for label in range(classes)] or [flat]
    return torch.stack([part.mean(0) if len(part) else flat.mean(0) for part in own])
