"""The exact attack on sentences by the span of the first attention layer's gradient (Petrov et al., DAGER, 2024)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.peeling import peeled
from fedveil.attacks.scene import Public, Scene
from fedveil.attacks.sentence_fit import EXACT, SentenceFit, pairs_outside
from fedveil.attacks.sentence_search import Candidate, Options, carried_on, laid_out, whole_sentences
from fedveil.attacks.text_layers import TextLayers
from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import attacks
from fedveil.tasks.models.transformer import TextModel
from fedveil.tree import Tree

AT_ONCE = 4  # victims of a piece
COARSE = 1e-4  # outside of the span, in single precision, of what is looked at again in double
NOISY = 4  # how many times fewer options are looked at under noise
SLACK = 2.0  # how much farther outside than the best token at its place one may be, under noise
SECONDS = 3e-7  # for one token at one place


@attacks.register("token-span")
@declared
class TokenSpan(Attack):
    """Find the tokens whose embeddings lie in the span of the first attention layer's gradient, and join them.

    What the layer is given for each token of the vocabulary at each place is compared with the span of its gradient,
    whose rank comes from the noise in it. Sentences are put together from what lies in it by what the layers behind the
    first attention are given; each that fits exactly is taken off the update, and the others are looked for in what is
    left. No gradient of embeddings is needed, nothing is optimized, and no label is known.
    """

    paper: ClassVar[str] = "Petrov et al., DAGER: Exact Gradient Inversion for Large Language Models (2024)"
    modalities: ClassVar[tuple[str, ...]] = ("sentences",)
    revision: ClassVar[int] = 2  # embeddings that a defense moved are looked for, too

    options: Count = 16  # tokens, at most, that are tried at each place for each sentence of a batch

    def check(self, scene: Scene) -> None:
        """The layers of the model must be known, and fewer tokens than a span has room for."""
        check_layers(scene)

    def estimate(self, scene: Scene) -> Work:
        """A step for every victim."""
        form = scene.public.layout.text
        entries = 0 if form is None else form.entries * form.length
        return Work(scene.count, scene.count * (entries * SECONDS + scene.batch_size * 2.0))

    def pieces(self, scene: Scene) -> list[Scene]:
        """A few victims at a time."""
        return [scene.rows(slice(start, start + AT_ONCE)) for start in range(0, scene.count, AT_ONCE)]

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        """The sentences of every victim."""
        begun = time.perf_counter()
        victims = Victims.of(scene)
        every = in_span(victims.fits, self.options * scene.batch_size)
        found = []
        for number, options in enumerate(every):
            found.append(victims.solved(number, options))
            if scene.bench.report is not None:
                scene.bench.report(number + 1, scene.count)
        return finding(scene, found, time.perf_counter() - begun)


def check_layers(scene: Scene) -> None:
    """Refuse models whose layers cannot be looked at, and updates of too many tokens."""
    form = scene.public.layout.text
    if form is None or not isinstance(scene.public.model, TextModel):
        raise FedveilError("the spans of a text model's layers are looked at, and this is none")
    if scene.updates.kind != "gradient" and scene.updates.steps > 1:
        raise FedveilError("several local steps are no one gradient: its span is looked at under FedSGD only")
    layers = TextLayers(scene.public, scene.updates.before.rows([0]))
    if len(layers.groups) < 2:
        raise FedveilError("the update holds too few linear layers of the model: the span of attention is looked at")


@dataclass(frozen=True)
class Found:
    """A sentence, its label as far as that is known, and how badly it fits."""

    tokens: tuple[int, ...]
    label: int
    misfit: float


@dataclass(frozen=True, eq=False)
class Victims:
    """The updates of a scene as an attacker reads them, and the spans of each."""

    public: Public
    batch_size: int
    gradients: Sequence[Mapping[str, Tensor]]
    fits: Sequence[SentenceFit]
    randoms: Sequence[Generator]

    @classmethod
    def of(cls, scene: Scene) -> Victims:
        """What the attacker of a scene makes of its updates."""
        known = scene.knowledge()
        layers = TextLayers(scene.public, scene.updates.before.rows([0]))
        gradients, fits = [], []
        for victim in range(scene.count):
            gradients.append(known.target.row(victim))
            fits.append(SentenceFit.of(layers, gradients[-1], trust_of(known.weight, victim)))
        drawn = scene.streams.fold("sentences").uniform(1)[:, 0]
        randoms = [Generator().manual_seed(int(float(each) * 2**31)) for each in drawn]
        return cls(scene.public, scene.batch_size, gradients, fits, randoms)

    def solved(self, victim: int, options: Options) -> list[Found]:
        """The sentences of one victim, made of the options at every place."""
        fit, gradient, random = self.fits[victim], self.gradients[victim], self.randoms[victim]
        labels = read_labels(self.public, gradient, self.batch_size)
        causal = bool(getattr(self.public.model, "causal", False))
        found: list[Found] = []
        rest: list[Candidate] = []
        while len(found) < self.batch_size and any(options):
            candidates = carried_on(fit, options) if causal else whole_sentences(fit, options, random)
            rest = [each for each in candidates if not any(each.tokens == one.tokens for one in found)]
            exact = [each for each in rest if each.exact]
            if not exact:
                break
            sentence = laid_out([exact[0].tokens], fit.layers.form.length)[0]
            whole, left = self.fits[victim], None
            if self.batch_size > 1:
                left = peeled(self.public, fit, gradient, sentence, self.batch_size, whole)
            label = labels[0] if left is None or left.label is None else left.label
            found.append(Found(exact[0].tokens, label, exact[0].misfit))
            if left is None:
                found += [Found(each.tokens, labels[0], each.misfit) for each in exact[1:]]
                break
            fit, gradient = left.fit, left.gradient
            options = narrowed(fit, options)
        if len(found) < self.batch_size and rest:
            found += [Found(each.tokens, labels[0], each.misfit) for each in best_of(fit, rest, found)]
        return found[: self.batch_size]


def best_of(fit: SentenceFit, candidates: Sequence[Candidate], found: Sequence[Found]) -> list[Candidate]:
    """Candidates that do not fit exactly, those first that explain most of what noise leaves of the update."""
    taken = {each.tokens for each in found}
    rest = [each for each in candidates if each.tokens not in taken]
    if not rest:
        return []
    # Of each length the best by how it fits; lengths are compared by what they explain.
    lengths = sorted({len(each.tokens) for each in rest})
    firsts = {length: [each for each in rest if len(each.tokens) == length] for length in lengths}
    places = fit.layers.form.length
    explained = {
        length: fit.explained(laid_out([own[0].tokens], places)[0]) * (1 - own[0].misfit)
        for length, own in firsts.items()
    }
    order = sorted(lengths, key=lambda length: -explained[length])
    ranks = range(max(map(len, firsts.values())))
    return [firsts[length][rank] for rank in ranks for length in order if rank < len(firsts[length])]


def in_span(fits: Sequence[SentenceFit], at_most: int, tokens: Tensor | None = None) -> list[list[list[int]]]:
    """The tokens that may stand at every place, by the span of each victim's gradient: the likeliest first.

    at_most: options at one place, fewer under noise. tokens: those in question, by default the whole vocabulary.
    """
    form = fits[0].layers.form
    numbers = torch.arange(form.entries) if tokens is None else tokens
    places = _reached(fits)
    every: list[list[list[int]]] = []
    for fit, outside in zip(fits, pairs_outside(fits, numbers, places), strict=True):
        options: list[list[int]] = []
        if not fit.spans[0].rank:  # noise alone
            every.append([[] for _ in range(places)])
            continue
        most = at_most if fit.clean else max(1, at_most // NOISY)
        for place in range(places):
            values, order = outside[:, place].sort()
            chosen = order[:most][values[:most] <= max(COARSE, SLACK * float(values[0]))]
            options.append(numbers[chosen].tolist())
        every.append(narrowed(fit, options))
    return every


def narrowed(fit: SentenceFit, options: Options) -> list[list[int]]:
    """Of the options at each place, those that lie in the span in double precision, or not much farther out."""
    kept: list[list[int]] = []
    for place, tokens in enumerate(options):
        if not tokens:
            kept.append([])
            continue
        given = fit.layers.first(torch.tensor(tokens), place + 1)[:, place].double()
        outside = fit.outside(0, given)
        limit = EXACT if fit.clean else max(EXACT, SLACK * float(outside.min()))
        order = outside.argsort()
        kept.append([tokens[i] for i in order.tolist() if float(outside[i]) <= limit])
    return kept


def _reached(fits: Sequence[SentenceFit]) -> int:
    """Places up to the last one at which a sentence may end: by the token that ends them, if there is one."""
    form = fits[0].layers.form
    behind = form.ends[1]
    if not behind or not all(fit.clean for fit in fits):
        return form.length
    outside = torch.stack(pairs_outside(fits, torch.tensor([behind[-1]]), form.length))[:, 0].amin(0)
    ends = (outside < COARSE).nonzero().flatten()
    return int(ends[-1]) + 1 if len(ends) else form.length


def trust_of(weight: Tree, victim: int) -> dict[str, Tensor] | None:
    """The trust in each entry of one victim's update; None where all are trusted alike."""
    row = weight.row(victim)
    alike = all(bool((tensor == tensor.flatten()[0]).all()) for tensor in row.values())
    return None if alike else row


def read_labels(public: Public, gradient: Mapping[str, Tensor], batch_size: int) -> list[int]:
    """The likeliest label by the sign of the last layer's bias, once for every sentence: right for a batch of one."""
    last = [tensor for tensor in gradient.values() if public.classes and tensor.shape == (public.classes,)]
    return [int(last[-1].argmin()) if last else 0] * batch_size


def finding(scene: Scene, found: Sequence[Sequence[Found]], seconds: float) -> Reconstruction:
    """The sentences of all victims. What was not found is empty."""
    form = scene.public.layout.text
    assert form is not None
    size, target = scene.batch_size, scene.public.target
    inputs = torch.stack(
        [laid_out([each.tokens for each in own] + [()] * (size - len(own)), form.length) for own in found]
    )
    labels = target.zeros(scene.count, size)
    if target.kind == "class":
        for victim, own in enumerate(found):
            labels[victim, : len(own)] = torch.tensor([each.label for each in own], dtype=labels.dtype)
    nothing = torch.full((scene.count,), torch.nan)
    return Reconstruction(inputs, labels, nothing, seconds)
