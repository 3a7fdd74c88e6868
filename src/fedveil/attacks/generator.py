"""A generator of pictures that an attacker trains on auxiliary data: the decoder of a small autoencoder.

Its weights are a plain dict of tensors and decoding is a pure function of them, which `vmap` and `grad` can stack and
differentiate. Pictures are pixels in [0, 1] in here, whatever a task's normalization is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedveil.attacks.candidate import Learned
from fedveil.attacks.priors import Box
from fedveil.errors import FedveilError
from fedveil.fields import Count, RepeatsOrZero, declared
from fedveil.progress import Report
from fedveil.streams import Streams

REVISION = 1  # raised with every change that trains another generator
SMALLEST = 8  # pixels of a picture's sides
FEWEST = 10  # pictures to learn from
BASE = 7  # sides are halved until the shorter one has no more pixels than this
WIDTH = 32  # channels of the finest maps; coarser ones have twice as many
BATCH = 64  # pictures of a step
AT_ONCE = 256  # pictures that are encoded at a time
STEPS = 3000  # that are made where the number of epochs is not given
MOST_EPOCHS = 100  # that this comes to: few pictures are not learned by heart
RATE = 4e-3  # Adam's rate at its highest
WARM_UP = 0.2  # share of the steps in which the rate rises
HELD_OUT = 1000  # pictures that are held out to measure the error on, at most a tenth
LEAST_SPREAD = 1e-4  # of a direction of codes, relative to the widest
Part = TypeVar("Part")
OPERATIONS = 12  # in training for every tap of a kernel of encoder and decoder: both, there and back twice
SPEED = 1e11  # of them per second, measured on one core
DECODER = "decoder."  # the names of the decoder's weights begin so


@declared
class GeneratorSettings:
    """How a generator is trained. All that its weights depend on, beside the pictures and the seed."""

    latents: Count = 64  # numbers that stand for a picture
    epochs: RepeatsOrZero = 0  # passes over the pictures; 0: as many as make 3,000 steps, at most 100
    most: Count = 20_000  # pictures to learn from, evenly spread over those that there are

    def epochs_of(self, pictures: int) -> int:
        """The passes over so many pictures."""
        return self.epochs or max(1, min(MOST_EPOCHS, round(STEPS / batches_of(pictures))))


def training_seconds(shape: tuple[int, ...], settings: GeneratorSettings) -> float:
    """Estimated seconds of training on as many pictures as are allowed, on one core."""
    sizes, channels = sizes_of(shape), channels_of(shape)
    taps = sum(16 * a * b * math.prod(size) for a, b, size in zip(channels, channels[1:], sizes[1:], strict=False))
    numbers = taps + settings.latents * channels[-1] * math.prod(sizes[-1])
    steps = settings.epochs_of(settings.most) * batches_of(settings.most)
    return steps * BATCH * numbers * OPERATIONS / SPEED


def batches_of(pictures: int) -> int:
    """The steps of one pass."""
    return max(1, pictures // BATCH)


# ---- the decoder ---------------------------------------------------------------------------------------------


def sizes_of(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Height and width of the maps, from those of the picture to the coarsest.

    >>> sizes_of((1, 28, 28)), sizes_of((3, 8, 9))
    ([(28, 28), (14, 14), (7, 7)], [(8, 9), (4, 5)])
    """
    sizes = [(shape[1], shape[2])]
    while min(sizes[-1]) > BASE:
        height, width = sizes[-1]
        sizes.append((-(-height // 2), -(-width // 2)))
    return sizes


def channels_of(shape: tuple[int, ...]) -> list[int]:
    """The channels of the same maps."""
    return [shape[0], WIDTH, *[2 * WIDTH] * (len(sizes_of(shape)) - 2)]


def shapes_of(shape: tuple[int, ...], latents: int, classes: int) -> dict[str, tuple[int, ...]]:
    """What a generator of pictures of this shape is made of: the shape of every tensor."""
    sizes, channels = sizes_of(shape), channels_of(shape)
    flat = channels[-1] * math.prod(sizes[-1])
    found: dict[str, tuple[int, ...]] = {
        "mean": (latents,),  # of the codes of all pictures
        "centers": (classes, latents),  # of those of each class
        "scale": (latents, latents),  # their spread within classes: code = center + scale · latents
        f"{DECODER}linear.weight": (flat, latents),
        f"{DECODER}linear.bias": (flat,),
    }
    for step, (coarse, fine) in enumerate(zip(channels[:0:-1], channels[-2::-1], strict=True)):
        found[f"{DECODER}up{step}.weight"] = (coarse, fine, 4, 4)
        found[f"{DECODER}up{step}.bias"] = (fine,)
    return found


def decoded(weights: Learned, codes: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The pictures (B, *shape) that codes (B, n) stand for: pixels in [0, 1]."""
    sizes = sizes_of(shape)
    maps = F.linear(codes, weights[f"{DECODER}linear.weight"], weights[f"{DECODER}linear.bias"])
    maps = maps.relu().reshape(len(codes), -1, *sizes[-1])
    for step, (height, width) in enumerate(reversed(sizes[:-1])):
        weight, bias = (weights[f"{DECODER}up{step}.{part}"] for part in ("weight", "bias"))
        maps = F.conv_transpose2d(maps, weight, bias, stride=2, padding=1)[..., :height, :width]
        maps = maps.relu() if step < len(sizes) - 2 else maps.sigmoid()
    return maps


def decoder_of(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Those of the decoder alone, of tensors or their shapes by name."""
    return {name: part for name, part in parts.items() if name.startswith(DECODER)}


# ---- the encoder, which only training needs ------------------------------------------------------------------


def _encoder_shapes(shape: tuple[int, ...], latents: int) -> dict[str, tuple[int, ...]]:
    sizes, channels = sizes_of(shape), channels_of(shape)
    found: dict[str, tuple[int, ...]] = {}
    for step, (fine, coarse) in enumerate(pairwise(channels)):
        found[f"down{step}.weight"], found[f"down{step}.bias"] = (coarse, fine, 4, 4), (coarse,)
    flat = channels[-1] * math.prod(sizes[-1])
    return found | {"linear.weight": (latents, flat), "linear.bias": (latents,)}


def _encoded(weights: Learned, pictures: Tensor) -> Tensor:
    maps, step = pictures, 0
    while f"down{step}.weight" in weights:
        height, width = maps.shape[-2:]
        padded = F.pad(maps, (1, 1 + width % 2, 1, 1 + height % 2))
        maps = F.conv2d(padded, weights[f"down{step}.weight"], weights[f"down{step}.bias"], stride=2).relu()
        step += 1
    return F.linear(maps.flatten(1), weights["linear.weight"], weights["linear.bias"])


# ---- training ------------------------------------------------------------------------------------------------


def check_shape(shape: tuple[int, ...]) -> None:
    """Refuse what is no picture, or one too small for maps."""
    if len(shape) != 3 or min(shape[1:]) < SMALLEST:
        raise FedveilError(f"a generator draws pictures of at least {SMALLEST}×{SMALLEST} pixels, not shape {shape}")


class Trained(NamedTuple):
    """What training comes to."""

    weights: Learned  # see `shapes_of`
    held_out: float  # how well it gives back pictures that were held out, in decibels
    epochs: int


def trained(
    pictures: Tensor,
    labels: Tensor,
    classes: int,
    settings: GeneratorSettings,
    streams: Streams,
    report: Report | None = None,
) -> Trained:
    """The generator that pictures (N, C, H, W), pixels in [0, 1], teach.

    An autoencoder learns to give back its input. Its codes are then measured: those of each class around their mean,
    in units of their spread along their main directions. In these units a search starts at 0, the mean of its class,
    and likely pictures lie within a few units of it.

    streams: one stream, from which all random numbers come.
    """
    shape = tuple(pictures.shape[1:])
    check_shape(shape)
    if len(pictures) < FEWEST:
        raise FedveilError(f"a generator learns from at least {FEWEST} pictures, and there are {len(pictures)}")
    order = streams.fold("held out").permutation(len(pictures))[0]
    kept = min(HELD_OUT, len(pictures) // 10)
    held_out, own, labels = pictures[order[:kept]], pictures[order[kept:]], labels[order[kept:]]
    weights, encoder = _start(shape, settings.latents, streams)
    epochs = settings.epochs_of(len(own))
    _descend(own, weights, encoder, epochs, streams, report)
    with torch.no_grad():
        codes = torch.cat([_encoded(encoder, part) for part in torch.split(own, AT_ONCE)])
        back = torch.cat([decoded(weights, _encoded(encoder, part), shape) for part in torch.split(held_out, AT_ONCE)])
    error = float((back - held_out).square().mean())
    return Trained({**_measured(codes, labels, classes), **weights}, 10 * math.log10(1 / max(error, 1e-12)), epochs)


def evenly_spread(there: int, most: int) -> Tensor:
    """At most so many of the numbers 0, ..., there − 1: sets may lie class by class."""
    return torch.arange(there) if there <= most else torch.arange(most) * there // most


def as_pixels(inputs: Tensor, box: Box | None) -> Tensor:
    """Inputs within a valid range as pixels in [0, 1]; without one, their own range per channel stands for it."""
    low, high = box if box is not None else range_of(inputs)
    low, span = low.float(), (high - low).float().clamp_min(1e-6)
    return ((inputs.float() - low) / span).clamp(0, 1)


def range_of(inputs: Tensor) -> Box:
    """The lowest and the highest value of every channel: (C, 1, 1)."""
    values = inputs.transpose(0, 1).flatten(1)
    return values.amin(1)[:, None, None], values.amax(1)[:, None, None]


def _start(shape: tuple[int, ...], latents: int, streams: Streams) -> tuple[Learned, Learned]:
    """Random weights of decoder and encoder, of a size that keeps that of signals."""

    def drawn(name: str, size: tuple[int, ...], inputs: int) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(size)
        return streams.fold("weights", name).normal(*size)[0] * math.sqrt(2 / inputs)

    decoder, encoder = {}, {}
    for name, size in decoder_of(shapes_of(shape, latents, 1)).items():
        # Of a kernel's 16 taps two pixels apart, 4 meet in a pixel.
        decoder[name] = drawn(name, size, 4 * size[0] if len(size) == 4 else size[-1])
    for name, size in _encoder_shapes(shape, latents).items():
        encoder[name] = drawn(f"encoder.{name}", size, math.prod(size[1:]))
    return decoder, encoder


def _descend(
    pictures: Tensor, weights: Learned, encoder: Learned, epochs: int, streams: Streams, report: Report | None
) -> None:
    """Train both in place."""
    shape, batches = tuple(pictures.shape[1:]), batches_of(len(pictures))
    moved = [tensor.requires_grad_() for tensor in (*weights.values(), *encoder.values())]
    optimizer = torch.optim.Adam(moved, lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace((step + 1) / (epochs * batches + 1)))
    for step, rows in enumerate(_walk(len(pictures), epochs, batches, streams)):
        some = pictures[rows]
        optimizer.zero_grad()
        F.mse_loss(decoded(weights, _encoded(encoder, some), shape), some).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if report is not None:
            report(step + 1, epochs * batches)
    for tensor in moved:
        tensor.requires_grad_(False).grad = None


def _pace(done: float) -> float:
    """The share of the highest rate after a share of the steps: up in a fifth of them, then down along a cosine."""
    return done / WARM_UP if done < WARM_UP else 0.5 + 0.5 * math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))


def _walk(pictures: int, epochs: int, batches: int, streams: Streams) -> Iterator[Tensor]:
    """The pictures of every step: each pass takes them in an order of its own, and leaves out what fills no batch."""
    for epoch in range(epochs):
        order = streams.fold("order", epoch).permutation(pictures)[0]
        yield from order[: batches * BATCH].chunk(batches)


def _measured(codes: Tensor, labels: Tensor, classes: int) -> Learned:
    """Where codes lie. A class without pictures lies where all of them do."""
    codes = codes.double()
    mean = codes.mean(0)
    centers = mean.repeat(classes, 1)
    for label in sorted(set(labels.tolist())):
        centers[label] = codes[labels == label].mean(0)
    around = codes - centers[labels]
    values, vectors = torch.linalg.eigh(around.T @ around / len(around))
    spread = values.clamp_min(0).sqrt()
    scale = vectors * spread.clamp_min(LEAST_SPREAD * float(spread.max()) + 1e-12)
    return {"mean": mean.float(), "centers": centers.float(), "scale": scale.float().contiguous()}
