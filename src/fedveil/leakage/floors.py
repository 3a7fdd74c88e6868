"""Floors: what an attacker has without the update. A reconstruction that does not beat them shows no leak."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedveil.errors import FedveilError
from fedveil.leakage.catalog import metric


def mean_image(examples: Tensor) -> Tensor:
    """The mean (C, H, W) of training images (N, C, H, W), in pixels or normalized as they are.

    An attacker who knows the kind of data can always hand in this picture, and where the pictures are centered it
    scores surprisingly well.
    """
    if not len(examples):
        raise FedveilError("the mean image needs at least one training image")
    floating = examples.dtype if examples.is_floating_point() else torch.get_default_dtype()
    # Summed in float64 where the device has it: the mean of 60,000 images in float32 loses digits.
    exact = torch.float32 if examples.device.type == "mps" else torch.float64
    return examples.mean(0, dtype=exact).to(floating)


def better_floor(name: str, means: Mapping[str, float]) -> str:
    """Of several floors' means of one metric, the floor that leaks most: the one an attack has to beat.

    On a tie the first is taken; a mean that is not a number is passed over.

    >>> better_floor("mse", {"noise-floor": 1.3, "mean-floor": 0.7})
    'mean-floor'
    """
    described = metric(name)
    best = ""
    for floor, mean in means.items():
        if not math.isnan(mean) and (not best or described.leaks_more(mean, means[best])):
            best = floor
    if not best:
        raise FedveilError(f"no floor has a value for {name}")
    return best
