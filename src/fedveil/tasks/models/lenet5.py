"""LeNet-5 (LeCun et al., 1998)."""

from __future__ import annotations

from torch import nn

from fedveil.fields import declared
from fedveil.registry import models
from fedveil.tasks.models.base import Activation, ModelSpec, activation_layer, image_shape


@models.register("lenet5")
@declared
class LeNet5(ModelSpec):
    """LeNet-5: two 5×5 convolutions with average pooling, then layers of 120, 84 and the classes.

    Made for 32×32. Smaller images, such as MNIST's 28×28, are padded by 2 on each side at the first convolution, as
    the original did; 12×12 is the smallest that leaves a pixel after the second pooling.
    """

    activation: Activation = "relu"  # between the layers

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("lenet5", shape, smallest=12)
        padding = 2 if min(height, width) < 32 else 0

        def remaining(pixels: int) -> int:
            return ((pixels + 2 * padding - 4) // 2 - 4) // 2

        return nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=5, padding=padding),
            activation_layer(self.activation),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            activation_layer(self.activation),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * remaining(height) * remaining(width), 120),
            activation_layer(self.activation),
            nn.Linear(120, 84),
            activation_layer(self.activation),
            nn.Linear(84, classes),
        )
