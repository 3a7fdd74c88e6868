"""The normalization layers that models share."""

from __future__ import annotations

from typing import Literal

from torch import nn

Norm = Literal["batch", "group", "none"]


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """The normalization after a convolution."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(group_count(channels), channels) if norm == "group" else nn.Identity()


def group_count(channels: int) -> int:
    """At most 32 groups (Wu and He, 2018), of at least 4 channels if there are that many.

    A group of one channel on one pixel would always be normalized to zero.

    >>> group_count(64), group_count(512), group_count(6)
    (16, 32, 1)
    """
    smallest = min(4, channels)
    return max(n for n in range(1, 33) if channels % n == 0 and channels // n >= smallest)
