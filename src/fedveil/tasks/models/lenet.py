"""LeNet as the gradient inversion literature uses it (Zhu et al., Deep Leakage from Gradients, 2019)."""

from __future__ import annotations

from torch import nn

from fedveil.fields import declared
from fedveil.registry import models
from fedveil.tasks.models.base import ModelSpec, image_shape

CHANNELS = 12


@models.register("lenet")
@declared
class LeNet(ModelSpec):
    """The small sigmoid network of the inversion literature: three 5×5 convolutions and a linear layer.

    All weights and biases are drawn from U(−0.5, 0.5), far wider than PyTorch's own range, as in that literature's
    code. Not LeNet-5, which is `lenet5`.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("lenet", shape)
        # Two strides of 2 with padding 2: each rounds up.
        features = CHANNELS * -(-height // 4) * -(-width // 4)
        model = nn.Sequential(
            nn.Conv2d(channels, CHANNELS, kernel_size=5, padding=2, stride=2),
            nn.Sigmoid(),
            nn.Conv2d(CHANNELS, CHANNELS, kernel_size=5, padding=2, stride=2),
            nn.Sigmoid(),
            nn.Conv2d(CHANNELS, CHANNELS, kernel_size=5, padding=2, stride=1),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(features, classes),
        )
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
        return model
