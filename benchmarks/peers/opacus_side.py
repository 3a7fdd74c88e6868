"""Opacus's side of the benchmark of Guard: DP-SGD in plain steps, lenet, batch 64. Runs in its own environment."""

from __future__ import annotations

import copy
import json
import statistics
import time

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.nn import functional

SIZE, ROUNDS = 64, 50


def lenet() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, stride in ((1, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(channels, 12, kernel_size=5, padding=2, stride=stride), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(588, 10))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = torch.randn(SIZE, 1, 28, 28), torch.randint(0, 10, (SIZE,))
    model = lenet()
    private = GradSampleModule(copy.deepcopy(model))
    optimizer = DPOptimizer(
        torch.optim.SGD(private.parameters(), lr=0.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=SIZE,
        secure_mode=False,
    )

    def plain() -> None:
        model.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()

    def protected() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(private(inputs), targets).backward()
        optimizer.pre_step()  # clips, sums and adds noise; the weights stay

    ratios = []
    for _ in range(ROUNDS):
        seconds = []
        for call in (plain, protected):
            call()
            start = time.process_time()
            call()
            seconds.append(time.process_time() - start)
        ratios.append(seconds[1] / seconds[0])
    print(json.dumps({"plain steps": statistics.median(ratios[5:])}))


if __name__ == "__main__":
    main()
