"""The models on which DP-SGD is timed, in plain torch: both sides build the same ones. Batches of 64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SIZE, CLASSES = 64, 10


def lenet() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, stride in ((1, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(channels, 12, kernel_size=5, padding=2, stride=stride), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(588, CLASSES))


def group_norm_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for given, made, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 2)):
        layers += [nn.Conv2d(given, made, 3, stride=stride, padding=1, bias=False), nn.GroupNorm(8, made), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


class Transformer(nn.Module):
    """Embeddings, one encoder layer without dropout, and a head. `attention`: another class for its attention."""

    def __init__(self, attention: Callable[..., nn.Module] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        if attention is not None:
            self.layer.self_attn = attention(128, 4, batch_first=True, dropout=0.0)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(words)).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lenet,
    "CNN with GroupNorm": group_norm_cnn,
    "transformer layer": Transformer,
}


def batch(name: str) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step."""
    shapes = {"lenet": (1, 28, 28), "CNN with GroupNorm": (3, 32, 32)}
    inputs = torch.randn(SIZE, *shapes[name]) if name in shapes else torch.randint(0, 1000, (SIZE, 32))
    return inputs, torch.randint(0, CLASSES, (SIZE,))
