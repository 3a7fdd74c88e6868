"""The base of models that are chosen by name: declared fields, and a way to build the module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import nn

from fedveil.errors import FedveilError

Activation = Literal["relu", "sigmoid", "tanh"]


class ModelSpec(ABC):
    """A model without its weights. A new one is a module in this folder::

    @models.register("my-net")
    @declared
    class MyNet(ModelSpec):
        \"\"\"One line for `fedveil list models`.\"\"\"

        width: Count = 64

        def build(self, shape: tuple[int, ...], classes: int) -> nn.Module: ...
    """

    name: ClassVar[str]

    @abstractmethod
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for inputs of this shape (without the batch axis), with weights from torch's generator."""


def activation_layer(name: Activation) -> nn.Module:
    """A new activation module. None works in place, because torch.func and second derivatives need the inputs."""
    layers: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}
    return layers[name]()


def image_shape(model: str, shape: tuple[int, ...], smallest: int = 1) -> tuple[int, int, int]:
    """The shape as channels, height and width, or one line that says why the model cannot take it."""
    if len(shape) != 3:
        raise FedveilError(f"{model} takes images (channels, height, width), not inputs of shape {shape}: try mlp")
    channels, height, width = shape
    if min(height, width) < smallest:
        raise FedveilError(
            f"{model} needs images of at least {smallest}×{smallest} pixels, got {height}×{width}: try lenet or mlp"
        )
    return channels, height, width
