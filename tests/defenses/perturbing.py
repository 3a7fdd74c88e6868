"""For the tests of data defenses: small batches of images, and the papers' algorithms in slow, plain torch."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.streams import Streams
from fedveil.tree import Tree

SHAPE, CLASSES = (2, 4, 4), 3


def network(norm=False):
    torch.manual_seed(0)
    first = nn.Conv2d(2, 3, 3, padding=1)
    middle = [nn.BatchNorm2d(3)] if norm else []
    return nn.Sequential(first, *middle, nn.Tanh(), nn.Flatten(), nn.Linear(48, CLASSES))


def images(clients=3, size=4, *, norm=False, backend="loop", dtype=torch.float64, seed=0, step=0, validation=5):
    """A step of some clients that share a model; `step` gives other examples and streams."""
    generator = torch.Generator().manual_seed(10 * seed + step)
    model = network(norm).to(dtype)
    batch = ClientBatch(
        Engine(model, F.cross_entropy, backend=backend),
        Tree.expand({name: p.detach() for name, p in model.named_parameters()}, clients),
        Tree.expand({name: b.detach() for name, b in model.named_buffers()}, clients),
        torch.randn(clients, size, *SHAPE, generator=generator).to(dtype),
        torch.randint(0, CLASSES, (clients, size), generator=generator),
        Streams.seeded(seed, range(clients), "step", step),
    )
    held_out = torch.randn(clients, validation, *SHAPE, generator=generator).to(dtype)
    labels = torch.randint(0, CLASSES, (clients, validation), generator=generator)
    batch.validation = ClientBatch(
        batch.engine, batch.params, batch.buffers, held_out, labels, batch.streams.fold("validation")
    )
    return batch


def client_model(batch, k):
    model = copy.deepcopy(batch.engine.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(batch.params[name][k])
    return model


def gradient_of(model, x, y):
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def into_ring(delta, low, high):
    """L2, one image after another."""
    moved = []
    for one in delta:
        length = one.square().sum().sqrt()
        moved.append(one * (high / length) if length > high else one * (low / length) if length < low else one)
    return torch.stack(moved)


def drawn_start(streams, k, size, low, high, dtype=torch.float64):
    """FedEM's random start for client k: any direction, uniform length."""
    own = streams.fold("place", 0).fold("start")
    direction = own.normal(size, *SHAPE, dtype=dtype)[k]
    length = low + (high - low) * own.uniform(size, dtype=dtype)[k]
    return torch.stack([d / d.square().sum().sqrt() * r for d, r in zip(direction, length, strict=True)])


def plain_mask(slope, share):
    """The greatest |G| of each image, by sorting."""
    masks = []
    for one in slope:
        order = sorted(range(one.numel()), key=lambda i, one=one: -abs(one.flatten()[i].item()))
        mask = torch.zeros(one.numel(), dtype=one.dtype)
        mask[order[: int(share * one.numel())]] = 1
        masks.append(mask.reshape(one.shape))
    return torch.stack(masks)


def plain_fedem(
    model, x, y, delta, *, fresh, steps=15, alpha=0.1, eta=0.1, low=0.0, high=8 / 255, share=None, freeze=False
):
    """Algorithm 1 of FedEM for one client and one batch; with a share, FedCRAP. Returns δ and the shared gradient."""
    inner = copy.deepcopy(model)
    for step in range(steps):
        variable = delta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(inner(x + variable), y), variable)
        if share is not None:
            mask = plain_mask(slope, share)
            slope = mask * slope
            if step == 0 and fresh:
                delta = mask * delta
        delta = into_ring(delta - alpha * slope.sign(), low, high)
        if not freeze:
            gradient = gradient_of(inner, x + delta, y)
            with torch.no_grad():
                for name, parameter in inner.named_parameters():
                    parameter -= eta * gradient[name]
    return delta, gradient_of(copy.deepcopy(model), x + delta, y)


def plain_fedbarre(model, x, y, val, draws, *, epochs=1, lam=0.5, sigma, low=0.0, high, pgd=5, pgd_lr=0.1, lr=0.1):
    """Algorithm 2 of FedBARRE for one client; `draws[m][e]` is standard normal. Returns g and what led to it."""
    theta, kept = copy.deepcopy(model), []

    def total(at, delta):
        clean, moved = gradient_of(at, x, y), gradient_of(at, x + delta, y)
        return {name: lam * clean[name] + (1 - lam) * moved[name] for name in clean}

    for of_model in draws:
        for epoch in range(epochs):
            delta = into_ring(sigma * of_model[epoch], low, high)
            for _ in range(pgd):
                variable = delta.clone().requires_grad_()
                (slope,) = torch.autograd.grad(F.cross_entropy(theta(x + variable), y), variable)
                delta = into_ring(delta - pgd_lr * slope, low, high)
            gradient = total(theta, delta)
            with torch.no_grad():
                for name, parameter in theta.named_parameters():
                    parameter -= lr * gradient[name]
        kept.append((F.cross_entropy(theta(val[0]), val[1]).item(), copy.deepcopy(theta), delta))
    losses = [loss for loss, _, _ in kept]
    best = losses.index(min(losses))
    return total(kept[best][1], kept[best][2]), losses, best


def assert_rows(tree, k, expected):
    torch.testing.assert_close(tree.row(k), expected, rtol=1e-9, atol=1e-12)
