"""Inverting Gradients as `breaching` runs it, one victim after another. Runs in the environment of breaching.

    python breaching_side.py inputs.npz

Every line on stdin is a task, `{"victims": [0, 1], "iterations": 100, "total_variation": 0.2, "save": "out.npy"}`; the
answer is a line on stdout, `{"seconds": 1.0, "threads": 1}`, with the reconstructions in the file to save.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Torchvision does not import without its compiled operators, which come for another build of torch; nothing here
# calls them.
operators = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    operators.define(f"{operator}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")

import breaching  # noqa: E402
import torchvision  # noqa: E402


def lenet() -> nn.Module:
    """The same layers as fedveil's `lenet` for 3×32×32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 12, kernel_size=5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, kernel_size=5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, kernel_size=5, padding=2, stride=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(768, 10),
    )


def resnet18() -> nn.Module:
    """The same layers as fedveil's `resnet18:norm=group`, with its parameters in the same order."""
    model = torchvision.models.resnet18(
        num_classes=10, norm_layer=lambda width: nn.GroupNorm(min(32, width // 4), width)
    )
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


MODELS = {"lenet": lenet, "resnet18": resnet18}


class Side:
    """The victims' gradients, and the model they were computed at."""

    def __init__(self, path: str) -> None:
        arrays = {name: torch.from_numpy(array) for name, array in np.load(path).items() if array.dtype.kind != "U"}
        self.model = MODELS[str(np.load(path)["model"])]()
        count = len(list(self.model.parameters()))
        self.weights = [arrays[f"weight_{place}"] for place in range(count)]
        self.gradients = [arrays[f"gradient_{place}"] for place in range(count)]
        self.labels, self.start, self.images = arrays["labels"], arrays["start"], arrays["images"]
        self.mean, self.std = arrays["mean"].tolist(), arrays["std"].tolist()
        with torch.no_grad():
            for own, given in zip(self.model.parameters(), self.weights, strict=True):
                own.copy_(given)
        self.check()

    def check(self) -> None:
        """The first victim's gradient must come out as given: else the two sides would attack different models."""
        loss = nn.functional.cross_entropy(self.model(self.images[:1]), self.labels[:1])
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        for own, given in zip(found, self.gradients, strict=True):
            torch.testing.assert_close(own, given[0], rtol=1e-3, atol=1e-3 * float(given[0].abs().max()))

    def attack(self, victims: list[int], iterations: int, total_variation: float) -> Tensor:
        """Reconstructions of some of the victims, with the settings of breaching's own `invertinggradients`."""
        overrides = [
            f"optim.max_iterations={iterations}",
            f"regularization.total_variation.scale={total_variation}",
            "restarts.num_trials=1",
        ]
        config = breaching.get_attack_config("invertinggradients", overrides=overrides)
        attacker = breaching.attacks.prepare_attack(self.model, nn.CrossEntropyLoss(), config)
        metadata = types.SimpleNamespace(shape=self.images.shape[1:], mean=self.mean, std=self.std, modality="vision")
        payload = [{"parameters": self.weights, "buffers": [], "metadata": metadata}]
        found = []
        for victim in victims:
            known = {"num_data_points": 1, "labels": self.labels[victim : victim + 1], "local_hyperparams": None}
            gradients = [gradient[victim] for gradient in self.gradients]
            shared = [{"gradients": gradients, "buffers": None, "metadata": known}]
            start = self.start[victim : victim + 1]
            done, _ = attacker.reconstruct(payload, shared, server_secrets={}, initial_data=start)
            found.append(done["data"])
        return torch.cat(found)


def main(path: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # breaching prints
    side = Side(path)
    tell = partial(print, file=answers, flush=True)
    tell(json.dumps({"threads": torch.get_num_threads()}))
    for line in sys.stdin:
        task: dict[str, Any] = json.loads(line)
        save = task.pop("save")
        begun = time.perf_counter()
        found = side.attack(**task)
        seconds = time.perf_counter() - begun
        np.save(save, found.numpy())
        tell(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1])
