"""Perturbations of bounded size: what the data defenses share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tree import at_least_single

Norm = Literal["l2", "linf"]
Per = Literal["example", "token"]  # what a radius is for
PADDING = "attention_mask"  # the part of text inputs that tells tokens from padding
TINY = 1e-30  # keeps a division by a length of zero finite
VANISHED = 1e-9  # below this share of the lower bound a perturbation has no direction worth keeping


@dataclass(frozen=True)
class Ring:
    """The perturbations δ with low ≤ ‖δ‖ ≤ high, for every example on its own, or for every token of a text.

    >>> Ring(1.0, 2.0).project(torch.tensor([[[3.0, 4.0], [0.3, 0.4], [0.9, 1.2]]]), direction=lambda: None)
    tensor([[[1.2000, 1.6000],
             [0.6000, 0.8000],
             [0.9000, 1.2000]]])
    """

    low: float
    high: float
    norm: Norm = "l2"
    per: Per = "example"

    @property
    def axes(self) -> int:
        """The first axes of δ, which count clients, examples and perhaps tokens."""
        return 2 if self.per == "example" else 3

    def length(self, delta: Tensor) -> Tensor:
        """‖δ‖ of each example, or token, shaped to multiply δ."""
        axes = self.axes
        flat = delta.reshape(*delta.shape[:axes], -1)
        length = flat.abs().amax(-1) if self.norm == "linf" else torch.linalg.vector_norm(flat, dim=-1)
        return length.reshape(*delta.shape[:axes], *[1] * (delta.dim() - axes))

    def project(self, delta: Tensor, direction: Callable[[], Tensor]) -> Tensor:
        """The perturbation moved into the ring.

        In L2 to the nearest point. In L∞ entries are cut at `high`; a δ that must grow is scaled (our reading: the
        nearest point would move a single entry). A δ of no length that must grow takes a random `direction`.
        """
        wide = at_least_single(delta)  # in half precision a small δ could not be told from one that vanished
        length = self.length(wide)
        if self.low > 0:
            grown, size = wide, length
            vanished = length < VANISHED * self.low
            if vanished.any():
                grown = torch.where(vanished, direction().to(wide), wide)
                size = self.length(grown)
            wide = torch.where(length < self.low, grown / size.clamp_min(TINY) * self.low, wide)
        if self.norm == "linf":
            return wide.clamp(-self.high, self.high).to(delta.dtype)
        return torch.where(length > self.high, wide / length * self.high, wide).to(delta.dtype)

    def start(self, streams: Streams, like: Tensor) -> Tensor:
        """A random δ in the ring: L2: any direction, lengths uniform; L∞: entries uniform."""
        if self.norm == "linf":
            box = (2 * streams.uniform_like(like) - 1) * self.high
            return self.project(box, lambda: streams.normal_like(like))
        direction = at_least_single(streams.normal_like(like))
        sizes = like.shape[1 : self.axes]
        share = streams.uniform(math.prod(sizes), dtype=direction.dtype).to(like.device)
        length = self.low + (self.high - self.low) * share
        size = self.length(direction)
        return (direction / size.clamp_min(TINY) * length.reshape(size.shape)).to(like.dtype)


def require_real_inputs(batch: ClientBatch, name: str) -> None:
    """Refuse to perturb whole numbers, such as tokens: between them there is nothing to move to."""
    if not batch.perturbed.is_floating_point():
        kind = str(batch.perturbed.dtype).removeprefix("torch.")
        raise FedveilError(
            f"{name} perturbs real numbers, and here inputs are of type {kind}: name the part of the inputs that may "
            "be perturbed, such as perturb='inputs_embeds' for text"
        )


def check_per(batch: ClientBatch, per: Per, name: str) -> None:
    """Refuse a radius for each token where there are none."""
    if per == "token" and not_padding(batch) is None:
        raise FedveilError(f"{name}: per='token' is for text, and these inputs have no tokens: leave it out")


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

    channels_together: choose whole pixels, ranked by the sum of |value| over the first axis of the example.
    among: a mask of the entries to choose from; the share is a share of these.

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
    """The same where examples differ in how many entries count: each takes its own number of them."""
    flat = torch.where(among, size, -1.0).reshape(*size.shape[:axes], -1)
    room = (share * among.reshape(flat.shape).sum(-1, keepdim=True) + 1e-9).floor().clamp_min(1)
    rank = flat.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return ((rank < room) & (flat >= 0)).reshape(size.shape)
