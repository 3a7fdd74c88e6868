"""Inverting Gradients on 32 victims beside a plain autograd loop that attacks one at a time. One thread, warm."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.tables import Table
from fedveil.attacks import grouped_convolutions
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.matcher import Matcher
from fedveil.attacks.notes import Counter
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import Workbench
from fedveil.attacks.without_dropout import without_dropout
from fedveil.clients.engine import Backend, Engine
from fedveil.registry import models
from fedveil.streams import Streams
from fedveil.tree import Tree

VICTIMS, STEPS = 32, 60


def plain_attack(model: nn.Module, target: list[Tensor], label: Tensor, shape: tuple[int, ...], steps: int) -> Tensor:
    """The attack as its authors wrote it, on one image: cosine, TV, signed Adam."""
    x = torch.randn(1, *shape, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1)
    params = list(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        gradient = torch.autograd.grad(functional.cross_entropy(model(x), label), params, create_graph=True)
        dot = sum((g * t).sum() for g, t in zip(gradient, target, strict=True))
        ours = sum(g.square().sum() for g in gradient)
        theirs = sum(t.square().sum() for t in target)
        smooth = (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., :, 1:] - x[..., :, :-1]).abs().mean()
        (1 - dot / (ours * theirs).sqrt() + 1e-5 * smooth).backward()
        assert x.grad is not None
        x.grad.sign_()
        optimizer.step()
        with torch.no_grad():
            x.clamp_(-0.42, 2.82)
    return x.detach()


def measure() -> list[Table]:
    torch.set_num_threads(1)
    table = Table(
        "Inverting Gradients, 32 victims, one thread",
        [
            *("model", "input", "plain loop (ms per image and step)", "stacked", "compiled"),
            *("compiled, convolutions as they come", "cold start of compiled (s)"),
        ],
        "As multiples of the plain loop's speed (higher is faster), warm. The last but one without "
        "`attacks/grouped_convolutions.py`, which turns convolutions of few channels into products.",
    )
    for name, shape in (("lenet", (1, 28, 28)), ("lenet", (3, 32, 32))):
        model = models.build(name).build(shape, 10)
        problem = make_problem(model, shape)
        target = list(problem.target.row(0).values())
        assert problem.labels is not None
        plain_attack(model, target, problem.labels[0], shape, 5)
        start = time.perf_counter()
        plain_attack(model, target, problem.labels[0], shape, STEPS)
        plain = (time.perf_counter() - start) / STEPS
        cells, cold = [], 0.0
        backends: tuple[Backend, ...] = ("stacked", "compiled")
        for backend in backends:
            start = time.perf_counter()
            run(problem, backend, 3)
            cold = time.perf_counter() - start
            seconds = run(problem, backend, STEPS) / (STEPS * VICTIMS)
            cells.append(f"{plain / seconds:.1f}×")
        with patch.object(grouped_convolutions, "replace_narrow", return_value=0):
            run(untouched := replace(problem), "compiled", 3)
        cells.append(f"{plain * STEPS * VICTIMS / run(untouched, 'compiled', STEPS):.1f}×")
        table.add(name, "×".join(map(str, shape)), 1000 * plain, *cells, cold)
    return [table]


_MATCHERS: dict[tuple[int, str], Matcher] = {}


def run(problem: Problem, backend: Backend, steps: int) -> float:
    """Seconds of an attack on a matcher that is kept, so that its second run is warm."""
    key = (id(problem), backend)
    recipe = InvertingGradients(steps=steps, polish=0, settle=False).recipe()
    if key not in _MATCHERS:
        _MATCHERS[key] = Matcher(problem, recipe, Workbench(backend=backend))
    matcher = _MATCHERS[key]
    matcher.recipe = recipe
    return matcher.run(problem, 0, Counter(None, 1)).seconds


def make_problem(model: nn.Module, shape: tuple[int, ...], victims: int = VICTIMS) -> Problem:
    """Victims with one random image each, and their gradients."""
    inputs, labels = torch.randn(victims, 1, *shape), torch.randint(0, 10, (victims, 1))
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, victims)
    streams = Streams.seeded(0, range(victims))
    engine = Engine(model, functional.cross_entropy, backend="stacked")
    target = engine.gradient(params, Tree({}), inputs, labels, streams).update
    return Problem(
        model=without_dropout(model),
        loss=functional.cross_entropy,
        params=params,
        buffers=Tree({}),
        target=target,
        weight=target.map(torch.ones_like),
        shape=shape,
        batch_size=1,
        streams=streams,
        classes=10,
        labels=labels,
        box=(torch.tensor(-0.42), torch.tensor(2.82)),
    )
