"""Multi-layer perceptron."""

from __future__ import annotations

import itertools
import math

from torch import nn

from fedveil.fields import Count, declared
from fedveil.registry import models
from fedveil.tasks.models.base import Activation, ModelSpec, activation_layer


@models.register("mlp")
@declared
class MLP(ModelSpec):
    """Fully connected layers on the flattened input; with the default width the 784–256–10 of SPM-FL."""

    hidden: tuple[Count, ...] = (256,)  # the width of each hidden layer; empty: a linear model
    activation: Activation = "relu"  # between the layers

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise((math.prod(shape), *self.hidden)):
            layers += [nn.Linear(before, after), activation_layer(self.activation)]
        last = self.hidden[-1] if self.hidden else math.prod(shape)
        return nn.Sequential(*layers, nn.Linear(last, classes))
