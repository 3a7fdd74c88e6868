"""Label counts behind many local steps, by least squares.

Over local steps the last layer's bias moves by Σ rate·mean(one-hot − softmax). Read off as one gradient, that
underestimates every class that is there: the model learns it on the way, and its later steps move the bias less. So
the softmax is followed from the weights that the client was sent to those that it sent back. With P the mean softmax
over the steps, a row for each class of example, and q the shares of the classes, the mean gradient of the bias is
(P − I)ᵀ q: q is found by least squares, not negative and of sum 1. P needs features of each class, which the last
layer's weights give once q is about known: both are found in turns.

The idea is that of Recovering Labels from Local Updates in Federated Learning (ICML 2024), which has auxiliary data for
the features. Our reading has none: it starts from mean features, once as the ratio of the last layer's gradients gives
them, once held near those of random inputs, and takes the mean of what both lead to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import nnls
from torch import Tensor

from fedveil.attacks.scene import LocalSteps
from fedveil.defenses.base import step_weight

ROUNDS = 15  # in which features and shares are found in turns
DAMPING = 0.5  # by how much each round moves on
POINTS = 9  # on the way from the start to the end at which the softmax is computed
# Weight of equal shares in the least squares: what a trained model's update hardly tells is not made up.
EVENNESS = 0.3
FEATURE_RIDGE = 0.1  # how much the features of each class are held to their mean
RANDOM_FEATURES = 0.05  # how much the mean features are held to those of random inputs, in squares of the gradient
SLOWEST = 0.02  # of the fastest speed: a model that has learned everything still makes its steps
FITS = 12  # tries at how far the steps lead
STRICT = 10.0  # weight of the equation that shares sum to 1


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The last layer of one victim, in double precision: C classes, F features."""

    weight: Tensor  # (C, F), as the client was sent it
    bias: Tensor  # (C,)
    weight_gradient: Tensor  # (C, F): the mean over the local steps
    bias_gradient: Tensor  # (C,)
    softmax: Tensor  # (C,): the mean answer to random inputs at the start
    features: Tensor  # (F,): the mean features of random inputs, over start and end

    def without_decay(self, local: LocalSteps) -> LastLayer:
        """The same without what weight decay added to the gradients, taken at the middle of the way."""
        if not local.weight_decay:
            return self
        half = step_weight(local.lr, local.momentum) / 2
        added = [
            local.weight_decay * (start - half * moved)
            for start, moved in ((self.weight, self.weight_gradient), (self.bias, self.bias_gradient))
        ]
        weight_gradient, bias_gradient = self.weight_gradient - added[0], self.bias_gradient - added[1]
        return LastLayer(self.weight, self.bias, weight_gradient, bias_gradient, self.softmax, self.features)


def class_shares(layer: LastLayer, local: LocalSteps) -> Tensor:
    """The share of each class among the examples behind an update of many local steps: (C,), of sum 1."""
    rows, bias = layer.weight_gradient, layer.bias_gradient
    ratio = (rows * bias.sign()[:, None]).sum(0) / bias.abs().sum().clamp_min(1e-30)
    held = (bias @ rows + RANDOM_FEATURES * layer.features) / (bias.square().sum() + RANDOM_FEATURES)
    shares = torch.stack([_shares(layer, local, features) for features in (ratio, held)])
    return shares.mean(0)


def _shares(layer: LastLayer, local: LocalSteps, mean: Tensor) -> Tensor:
    """The shares if these are the mean features of the examples."""
    classes, gradient = len(layer.bias), layer.bias_gradient
    own = torch.eye(classes, dtype=gradient.dtype)
    answer = ((layer.weight @ mean + layer.bias).softmax(0) + layer.softmax) / 2
    shares = _proper(answer - gradient)
    softmax = answer.expand(classes, classes)
    for _ in range(ROUNDS):
        features = _class_features(shares[:, None] * (softmax - own), layer.weight_gradient, mean)
        way = _softmax_on_the_way(layer, local, features)
        found = torch.einsum("p,pkc->kc", _time_at(way, shares, gradient, local), way)
        softmax = DAMPING * found + (1 - DAMPING) * softmax
        shares = DAMPING * least_squares_shares((softmax - own).T, gradient) + (1 - DAMPING) * shares
    return shares


def least_squares_shares(matrix: Tensor, gradient: Tensor, evenness: float = EVENNESS) -> Tensor:
    """The q ≥ 0 of sum 1 for which matrix·q is nearest to the gradient, held to equal shares by `evenness`."""
    classes = matrix.shape[1]
    one = matrix.new_ones(1, classes)
    even = evenness * torch.eye(classes, dtype=matrix.dtype)
    left = torch.cat([matrix, STRICT * one, even])
    right = torch.cat([gradient, STRICT * gradient.new_ones(1), even @ one[0] / classes])
    return _proper(torch.from_numpy(nnls(left.numpy(), right.numpy())[0]))


def _proper(shares: Tensor) -> Tensor:
    """Not negative and of sum 1."""
    shares = shares.clamp_min(0)
    total = shares.sum()
    return shares / total if total > 0 else torch.full_like(shares, 1 / len(shares))


def _class_features(errors: Tensor, rows: Tensor, mean: Tensor) -> Tensor:
    """Features (K, F) of each class that make up the last layer's gradient, near their mean.

    errors: (K, C), the share of each class times its mean of softmax − one-hot.
    """
    left_over = rows - errors.sum(0)[:, None] * mean
    ridge = FEATURE_RIDGE * errors.square().sum() / len(errors) + 1e-12
    system = errors @ errors.T + ridge * torch.eye(len(errors), dtype=errors.dtype)
    features: Tensor = mean + torch.linalg.solve(system, errors @ left_over)
    return features


def _softmax_on_the_way(layer: LastLayer, local: LocalSteps, features: Tensor) -> Tensor:
    """The softmax (POINTS, K, C) of each class of examples on the straight way from the start to the end."""
    moved = torch.linspace(0, 1, POINTS, dtype=features.dtype) * step_weight(local.lr, local.momentum)
    start, change = features @ layer.weight.T + layer.bias, features @ layer.weight_gradient.T + layer.bias_gradient
    return (start - moved[:, None, None] * change).softmax(-1)


def _time_at(way: Tensor, shares: Tensor, gradient: Tensor, local: LocalSteps) -> Tensor:
    """How much each point of the way counts in the mean over the steps: (POINTS,), of sum 1.

    A client is fast as long as it is often wrong, and then slows down. With momentum an early step counts for more.
    """
    own = torch.eye(way.shape[2], dtype=way.dtype)
    wrong = torch.einsum("k,pkc->pc", shares, way - own)
    speed = (wrong @ gradient / gradient.norm().clamp_min(1e-30)).clamp_min(0)
    speed = speed.clamp_min(SLOWEST * float(speed.max())).clamp_min(1e-12)
    time = way.new_zeros(len(way))
    for place, weight in zip(_places(speed.tolist(), local), step_weights(local), strict=True):
        low, part = _between(place, len(way))
        time[low] += weight * (1 - part)
        time[low + 1] += weight * part
    return time / time.sum()


def _places(speed: list[float], local: LocalSteps) -> list[float]:
    """Where on the way, from 0 to 1, each step starts, so that the last one ends at 1."""
    length = step_weight(local.lr, local.momentum) * sum(speed) / len(speed)
    places: list[float] = []
    for _ in range(FITS):
        place, velocity, places = 0.0, 0.0, []
        for rate in local.lr:
            places.append(min(place, 1.0))
            low, part = _between(places[-1], len(speed))
            velocity = local.momentum * velocity + speed[low] * (1 - part) + speed[low + 1] * part
            place += rate * velocity / length
        length *= min(max(place, 0.3), 3.0) ** 0.7
    return places


def _between(place: float, points: int) -> tuple[int, float]:
    """The point before a place on the way, and how far it is to the next."""
    low = min(int(place * (points - 1)), points - 2)
    return low, place * (points - 1) - low


def step_weights(local: LocalSteps) -> list[float]:
    """By how much the gradient of each step moves the weights in all: with momentum, in later steps too."""
    weights: list[float] = []
    later = 0.0
    for rate in reversed(local.lr):
        later = rate + local.momentum * later
        weights.insert(0, later)
    return weights
