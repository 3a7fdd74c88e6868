"""ConvNet, the plain deep network of the inversion literature (Geiping et al., Inverting Gradients, 2020)."""

from __future__ import annotations

import itertools

from torch import nn

from fedveil.fields import Count, declared
from fedveil.registry import models
from fedveil.tasks.models.base import ModelSpec, image_shape
from fedveil.tasks.models.norms import Norm, norm_layer


@models.register("convnet")
@declared
class ConvNet(ModelSpec):
    """ConvNet-64 of Inverting Gradients and FedEM: eight 3×3 convolutions, two poolings by 3, a linear layer.

    With width w the convolutions have w, 2w, 2w, 4w, 4w, 4w, pooling, 4w, 4w channels, pooling; a 32×32 image leaves
    3×3 pixels, so the linear layer has 36w inputs. Other sizes change the linear layer alone; 9×9 is the smallest.

    Weights are PyTorch's default draw, as in that literature's code, and as there every convolution has a bias, though
    a batch norm cancels it: its gradient is zero. Without a norm the default draw would give all images nearly the
    same output, so the convolutions are then drawn by He initialization, which is ours.
    """

    width: Count = 64  # channels of the first layer
    norm: Norm = "batch"  # "group" has no running statistics and does not couple the examples of a batch

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("convnet", shape, smallest=9)
        w = self.width
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(
            itertools.pairwise((channels, w, 2 * w, 2 * w, 4 * w, 4 * w, 4 * w, 4 * w, 4 * w)), start=1
        ):
            layers += [nn.Conv2d(before, after, 3, padding=1), norm_layer(self.norm, after), nn.ReLU()]
            if number in (6, 8):
                layers.append(nn.MaxPool2d(3))
        features = 4 * w * (height // 9) * (width // 9)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes))
        if self.norm == "none":
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        return model
