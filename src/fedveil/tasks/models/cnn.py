"""The small convolutional network of SPM-FL's CIFAR-10 experiments (its model 1)."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedveil.fields import declared
from fedveil.registry import models
from fedveil.tasks.models.base import Activation, ModelSpec, activation_layer, image_shape


@models.register("cnn")
@declared
class CNN(ModelSpec):
    """SPM-FL's model 1: convolutions of 64 and 128 channels with max-pooling, then layers of 384, 192 and the classes.

    A 32×32 image leaves 128 channels of 8×8, the paper's 8192 features: the convolutions keep the size and each
    pooling halves it. Other sizes change the first linear layer alone; 4×4 is the smallest. The paper gives neither
    the kernel's size nor the initialization: 3×3 and PyTorch's default draw are our reading.
    """

    kernel: Literal[3, 5] = 3  # side of the filters
    activation: Activation = "relu"  # between the layers

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("cnn", shape, smallest=4)
        return nn.Sequential(
            nn.Conv2d(channels, 64, self.kernel, padding=self.kernel // 2),
            activation_layer(self.activation),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, self.kernel, padding=self.kernel // 2),
            activation_layer(self.activation),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128 * (height // 4) * (width // 4), 384),
            activation_layer(self.activation),
            nn.Linear(384, 192),
            activation_layer(self.activation),
            nn.Linear(192, classes),
        )
