"""Opacus's side of the benchmark of Guard: DP-SGD in plain steps, batch 64. Runs in its own environment."""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from opacus import GradSampleModule
from opacus.layers import DPMultiheadAttention
from opacus.optimizers import DPOptimizer
from private_models import MODELS, SIZE, Transformer, batch
from torch.nn import functional

ROUNDS = 25


def plain_steps(name: str) -> float:
    """A step of DP-SGD in plain steps of the same model."""
    torch.manual_seed(0)
    inputs, targets = batch(name)
    model = MODELS[name]()
    # Opacus knows attention only by a class of its own.
    private = GradSampleModule(Transformer(DPMultiheadAttention) if "transformer" in name else MODELS[name]())
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
        plain_time, protected_time = (_seconds(call) for call in (plain, protected))
        ratios.append(protected_time / plain_time)
    return statistics.median(ratios[5:])


def _seconds(call: Callable[[], None]) -> float:
    call()
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps({name: plain_steps(name) for name in MODELS}))


if __name__ == "__main__":
    main()
