"""ResNet-18 (He et al., 2016), with the small stem of the CIFAR variants for small images."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.fields import Count, declared
from fedveil.registry import models
from fedveil.tasks.models.base import ModelSpec, activation_layer, image_shape
from fedveil.tasks.models.norms import Norm, norm_layer

LARGEST_SMALL = 64  # pixels; up to here the stem keeps the resolution


@models.register("resnet18")
@declared
class ResNet18(ModelSpec):
    """ResNet-18: a 3×3 stem up to 64 pixels, the 7×7 stem with max-pooling above.

    `norm="group"` has no running statistics to share between clients and no coupling between the examples of a batch.
    Without a norm, convolutions have biases; a sigmoid net without a norm hardly distinguishes its inputs. Gradient
    Dropout's experiments use `activation="sigmoid"`. Weights are PyTorch's default draw, as in the CIFAR variants of
    the inversion literature, not torchvision's; without a norm see `ResNet._widen`.

    Any size will do: 28, 32 and 64 pixels leave 4×4, 4×4 and 8×8 before the mean, 224 and 256 leave 7×7 and 8×8.
    """

    norm: Norm = "batch"  # "group" has no running statistics and does not couple the examples of a batch
    activation: Literal["relu", "sigmoid"] = "relu"  # between the layers
    width: Count = 64  # channels of the first stage; the others have 2, 4 and 8 times as many

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("resnet18", shape)
        return ResNet(channels, classes, self, small=max(height, width) <= LARGEST_SMALL)


class ResNet(nn.Module):
    """Stem, four stages of two blocks, mean over the image, linear layer."""

    def __init__(self, channels: int, classes: int, spec: ResNet18, *, small: bool) -> None:
        super().__init__()
        width = spec.width
        self.stem = nn.Sequential(
            convolution(channels, width, spec.norm, kernel=3 if small else 7, stride=1 if small else 2),
            norm_layer(spec.norm, width),
            activation_layer(spec.activation),
            nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[Block] = []
        before = width
        for stage in range(4):
            after = width * 2**stage
            blocks.append(Block(before, after, 1 if stage == 0 else 2, spec))
            blocks.append(Block(after, after, 1, spec))
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)
        if spec.norm == "none":
            self._widen(blocks)

    def _widen(self, blocks: list[Block]) -> None:
        """Draw weights for a net without norms: with PyTorch's default, all inputs would give almost the same output.

        He initialization keeps the size of the signal through a convolution; dividing the end of each residual by the
        root of the number of blocks keeps the sum of the blocks from growing (after Zhang et al., Fixup, 2019).
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        with torch.no_grad():
            for block in blocks:
                block.last.weight.mul_(len(blocks) ** -0.5)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.stem(images))
        logits: Tensor = self.head(features.mean((-2, -1)))
        return logits


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, spec: ResNet18) -> None:
        super().__init__()
        self.first = convolution(before, after, spec.norm, kernel=3, stride=stride)
        self.first_norm = norm_layer(spec.norm, after)
        self.last = convolution(after, after, spec.norm, kernel=3)
        self.last_norm = norm_layer(spec.norm, after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                convolution(before, after, spec.norm, kernel=1, stride=stride),
                norm_layer(spec.norm, after),
            )
        self.activation = activation_layer(spec.activation)

    def forward(self, features: Tensor) -> Tensor:
        residual = self.last_norm(self.last(self.activation(self.first_norm(self.first(features)))))
        # Not `+=`: in-place sums break vmap and second derivatives.
        result: Tensor = self.activation(residual + self.shortcut(features))
        return result


def convolution(before: int, after: int, norm: Norm, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size up to its stride; a norm that follows would cancel its bias."""
    return nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=norm == "none")
