"""Perturbations of bounded size: what the data defenses share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch
from fedveil.streams import Streams

Norm = Literal["l2", "linf"]
PADDING = "attention_mask"  # the part of text inputs that tells tokens from padding
TINY = 1e-30  # keeps a division by the length of nothing finite
VANISHED = 1e-9  # below this share of the lower bound a perturbation has no direction worth keeping


@dataclass(frozen=True)
class Ring:
    """The perturbations δ with low ≤ ‖δ‖ ≤ high, for every example on its own.

    >>> Ring(1.0, 2.0).project(torch.tensor([[[3.0, 4.0], [0.3, 0.4], [0.9, 1.2]]]), direction=lambda: None)
    tensor([[[1.2000, 1.6000],
             [0.6000, 0.8000],
             [0.9000, 1.2000]]])
    """

    low: float
    high: float
    norm: Norm = "l2"

    def length(self, delta: Tensor, axes: int = 2) -> Tensor:
        """‖δ‖ of each example, shaped to multiply δ; the first `axes` axes count clients and examples."""
        flat = delta.reshape(*delta.shape[:axes], -1)
        length = flat.abs().amax(-1) if self.norm == "linf" else torch.linalg.vector_norm(flat, dim=-1)
        return length.reshape(*delta.shape[:axes], *[1] * (delta.dim() - axes))

    def project(self, delta: Tensor, direction: Callable[[], Tensor], axes: int = 2) -> Tensor:
        """The perturbation moved into the ring.

        In L2 to the nearest point. In L∞ entries are cut at `high`; a δ that must grow is scaled (our reading: the
        nearest point would move a single entry). A δ of no length that must grow takes a random `direction`.
        """
        length = self.length(delta, axes)
        if self.low > 0:
            grown, size = delta, length
            vanished = length < VANISHED * self.low
            if vanished.any():
                grown = torch.where(vanished, direction().to(delta), delta)
                size = self.length(grown, axes)
            delta = torch.where(length < self.low, grown / size.clamp_min(TINY) * self.low, delta)
        if self.norm == "linf":
            return delta.clamp(-self.high, self.high)
        return torch.where(length > self.high, delta / length * self.high, delta)

    def start(self, streams: Streams, like: Tensor) -> Tensor:
        """A random δ in the ring: L2: any direction, lengths uniform; L∞: entries uniform."""
        if self.norm == "linf":
            box = (2 * streams.uniform_like(like) - 1) * self.high
            return self.project(box, lambda: streams.normal_like(like))
        direction = streams.normal_like(like)
        share = streams.uniform(like.shape[1], dtype=like.dtype).to(like.device)
        length = self.low + (self.high - self.low) * share
        return direction / self.length(direction).clamp_min(TINY) * length.reshape(self.length(like).shape)

    def farthest(self, noise: Tensor, axes: int = 1) -> Tensor:
        """Standard normal noise as a random δ of the greatest length: where sign steps and error minimizing end up."""
        if self.norm == "linf":
            return noise.sign() * self.high
        return noise / self.length(noise, axes).clamp_min(TINY) * self.high

    def clamped(self, draw: Tensor, axes: int = 1) -> Tensor:
        """A draw with its length brought into the ring, as a function that `vmap` can go through; zero stays zero."""
        length = self.length(draw, axes)
        return draw / length.clamp_min(TINY) * length.clamp(self.low, self.high)


def not_padding(batch: ClientBatch) -> Tensor | None:
    """For text: which positions are tokens, shaped to multiply their embeddings. Padding is not perturbed."""
    if isinstance(batch.inputs, Tensor) or PADDING not in batch.inputs:
        return None
    mask, like = batch.inputs[PADDING], batch.perturbed
    if like.shape[: mask.dim()] != mask.shape:
        return None
    return mask.bool().reshape(*mask.shape, *[1] * (like.dim() - mask.dim()))


def top_share(
    values: Tensor, share: float, axes: int = 2, *, channels_together: bool = False, among: Tensor | None = None
) -> Tensor:
    """A mask of the `share` of each example's entries with the greatest magnitude: at least one, at most that share.

    channels_together: of each example's pixels, ranked by the sum of |value| over the first axis of the example.
    among: a mask of the entries that count at all; the share is of these, and it takes none of the others.

    >>> top_share(torch.tensor([[[3.0, -4.0, 1.0, 0.0]]]), 0.5)
    tensor([[[ True,  True, False, False]]])
    """
    size = values.abs()
    if among is not None:
        return _top_share_among(size, share, among.expand_as(size), axes)
    if channels_together:
        size = size.sum(axes, keepdim=True)
    flat = size.reshape(*size.shape[:axes], -1)
    count = max(1, int(share * flat.shape[-1] + 1e-9))  # 0.29 · 100 is a little less than 29
    if count == flat.shape[-1]:
        return torch.ones_like(values, dtype=torch.bool)
    best = flat.topk(count, dim=-1).indices
    mask = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, best, torch.ones_like(best, dtype=torch.bool))
    return mask.reshape(size.shape).expand(values.shape)


def _top_share_among(size: Tensor, share: float, among: Tensor, axes: int) -> Tensor:
    """Examples differ in how many entries count, so that each has a rank of its own up to which it takes them."""
    flat = torch.where(among, size, -1.0).reshape(*size.shape[:axes], -1)
    room = (share * among.reshape(flat.shape).sum(-1, keepdim=True) + 1e-9).floor().clamp_min(1)
    rank = flat.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return ((rank < room) & (flat >= 0)).reshape(size.shape)
