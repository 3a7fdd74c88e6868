"""Candidates that a generator draws: latents that it decodes, or a copy of its weights for every picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fedveil.attacks.candidate import Found, Learned, Variables, held
from fedveil.attacks.generator import decoded, decoder_of
from fedveil.streams import Streams

if TYPE_CHECKING:
    from fedveil.attacks.problem import Problem

LATENTS, CENTER, CODE, COPY = "latents", "center", "code", "copy "
LOW, SPAN = "low", "span"  # what a search adds to a generator: the valid range, in the shape of a picture


@dataclass(frozen=True)
class Latents:
    """What a generator decodes, in units of the spread of its training pictures, around the mean of the label's class.

    The search starts near 0. A little off it: pictures of one class in a batch would otherwise move as one.
    """

    weight: float = 0.0  # of the latents' mean square: keeps them where pictures are likely
    jitter: float = 0.1  # spread of the start

    def start(self, problem: Problem, streams: Streams, found: Found | None = None) -> Variables:
        """Near the mean pictures of the labels, or where the phase before came to."""
        if found is not None and LATENTS in found.variables:
            return {name: found.variables[name].detach().clone() for name in (LATENTS, CENTER)}
        learned, like = problem.learned, problem.like
        shape = (problem.batch_size, len(learned["mean"]))
        return {LATENTS: self.jitter * streams.normal(*shape).to(like), CENTER: centers_of(problem)}

    def decode(self, variables: Variables, learned: Learned) -> Tensor:
        """The generator's pictures, within the valid range."""
        return in_range(decoded(learned, code_of(variables, learned), tuple(learned[LOW].shape)), learned)

    def cost(self, variables: Variables) -> Tensor | None:
        """The weighted mean square of the latents."""
        return self.weight * variables[LATENTS].square().mean() if self.weight else None

    def project(self, variables: Variables, problem: Problem) -> None:
        """Nothing to do: whatever is decoded is valid."""


@dataclass(frozen=True)
class GeneratorCopies:
    """A generator for every picture: copies of the trained one, whose weights are moved at the codes that were found.

    A copy can draw what the trained one cannot, and begins with what that can.
    """

    def start(self, problem: Problem, streams: Streams, found: Found | None = None) -> Variables:
        """The trained weights, at the latents that the phase before found; or the copies that it found."""
        if found is not None and CODE in found.variables:
            return {n: t.detach().clone() for n, t in found.variables.items() if n == CODE or n.startswith(COPY)}
        begun = Latents().start(problem, streams, found)
        with torch.no_grad():
            code = vmap(code_of, in_dims=(0, None))(begun, problem.learned)
        many = (problem.count, problem.batch_size)
        copies = {
            COPY + name: tensor.to(problem.like).expand(*many, *tensor.shape).clone()
            for name, tensor in decoder_of(problem.learned).items()
        }
        return {CODE: code, **copies}

    def decode(self, variables: Variables, learned: Learned) -> Tensor:
        """What each picture's own generator makes of its code, within the valid range."""
        copies = {name.removeprefix(COPY): tensor for name, tensor in variables.items() if name.startswith(COPY)}
        shape = tuple(learned[LOW].shape)

        def one(weights: Learned, code: Tensor) -> Tensor:
            return decoded(weights, code[None], shape)[0]

        return in_range(vmap(one)(copies, held(variables[CODE])), learned)

    def cost(self, variables: Variables) -> Tensor | None:
        """Nothing."""
        return None

    def project(self, variables: Variables, problem: Problem) -> None:
        """Nothing to do: whatever is decoded is valid."""


def centers_of(problem: Problem) -> Tensor:
    """Where the codes of every victim's labels lie (V, B, n); of labels that nothing is known of, the mean."""
    centers, mean = problem.learned["centers"].to(problem.like), problem.learned["mean"].to(problem.like)
    if problem.labels is None:
        return mean.expand(problem.count, problem.batch_size, -1).clone()
    known = problem.labels < len(centers)
    return torch.where(known[..., None], centers[problem.labels.clamp_max(len(centers) - 1)], mean)


def code_of(variables: Variables, learned: Learned) -> Tensor:
    """The codes (B, n) of latents."""
    return held(variables[CENTER]) + variables[LATENTS] @ learned["scale"].T


def in_range(pixels: Tensor, learned: Learned) -> Tensor:
    """Pixels in [0, 1] as the model sees them."""
    return learned[LOW] + learned[SPAN] * pixels
