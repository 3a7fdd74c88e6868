"""Reading tokens off the gradient of the embedding layer, where it is shared, and putting them in order by places."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.attacks.agreeing_rows import by_agreement
from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.noisy_rows import likeliest
from fedveil.attacks.scene import Public, Scene
from fedveil.attacks.sentence_search import Options
from fedveil.attacks.threat import ThreatModel
from fedveil.attacks.token_span import Found, Victims, check_layers, finding, in_span, read_labels
from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import attacks
from fedveil.tasks.models.transformer import TextModel
from fedveil.tasks.text_form import TextForm

PRESENT = 5.0  # standard deviations by which the row of a token that was used stands out of the noise
CLEAN = 1e-10  # of the largest row: less noise than that is rounding
LEAST = 0.25  # of a whole: the share of a place's gradient that makes a token an option there


@attacks.register("token-rows")
@declared
class TokenRows(Attack):
    """Read the tokens off the embedding layer's gradient, and their order off that of the places.

    Only tokens of the batch have a row in the gradient of the token table, so the set of tokens is read off. The row of
    a token is the sum of the rows of the places that it stands at, which tells where. Of batches of several sentences
    the rows say which tokens may stand at a place, and the sentences are put together as `token-span` does. Under noise
    tokens are shared out among the places by how well the rows of both agree, so none need stand out alone; of rows
    that are masked, or have decoys, the entries count in which they are equal. Needs a model that shares the gradient
    of its embeddings, as any does that is trained as a whole. A real attacker does this first.
    """

    modalities: ClassVar[tuple[str, ...]] = ("sentences",)
    revision: ClassVar[int] = 3  # weak rows are read through noise, and those with holes entry by entry

    options: Count = 16  # tokens, at most, that are tried at each place for each sentence of a batch

    @property
    def threat(self) -> ThreatModel:
        """It looks at the embedding layer."""
        return replace(super().threat, may=("reads tokens off the embedding layer's gradient",))

    def check(self, scene: Scene) -> None:
        """The update must hold the gradients of both tables."""
        Tables.of(scene)
        if scene.batch_size > 1:
            check_layers(scene)
        elif scene.updates.kind != "gradient" and scene.updates.steps > 1:
            raise FedveilError("several local steps are no one gradient: rows are read off under FedSGD only")

    def estimate(self, scene: Scene) -> Work:
        """A step for every victim."""
        return Work(scene.count, scene.count * (0.1 if scene.batch_size == 1 else 3.0 * scene.batch_size))

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        """The sentences of every victim."""
        begun = time.perf_counter()
        tables, known = Tables.of(scene), scene.knowledge()
        victims = Victims.of(scene) if scene.batch_size > 1 else None
        found = []
        for number in range(scene.count):
            rows = tables.read(known.target.row(number))
            if victims is None:
                label = read_labels(scene.public, known.target.row(number), 1)[0]
                found.append([Found(rows.sentence(), label, 0.0)])
            else:
                options = self._options(victims, number, rows, scene.batch_size)
                found.append(victims.solved(number, options))
            if scene.bench.report is not None:
                scene.bench.report(number + 1, scene.count)
        return finding(scene, found, time.perf_counter() - begun)

    def _options(self, victims: Victims, number: int, rows: Rows, size: int) -> Options:
        """The tokens that may stand at each place: of those that were read off, the ones in the span of the gradient.

        Under noise the rows alone decide.
        """
        fit = victims.fits[number]
        if fit.clean:
            return in_span([fit], self.options * size, torch.tensor(rows.tokens))[0]
        return rows.options(2 * size)


@dataclass(frozen=True)
class Tables:
    """The parameters that hold the embeddings of tokens and of places."""

    tokens: str
    places: str
    form: TextForm
    first: int  # the row of the first place

    @classmethod
    def of(cls, scene: Scene) -> Tables:
        """Those of a scene's model; an update without their gradients is refused."""
        public, there = scene.public, scene.updates.message
        form = public.layout.text
        if form is None or not isinstance(public.model, TextModel):
            raise FedveilError("token-rows reads the embedding layer of a text model, and this is none")
        tokens = public.model.table_name
        if tokens not in there:
            raise FedveilError("the embeddings are frozen, so no gradient of them is shared to read tokens off")
        places = _place_table(public, scene.updates.before.row(0), form)
        if places is None or places not in there:
            raise FedveilError("no gradient of embeddings of places is shared, by which tokens are put in order")
        return cls(tokens, places, form, public.model.first_place)

    def read(self, gradient: Mapping[str, Tensor]) -> Rows:
        """The rows of both tables in one gradient."""
        table = gradient[self.tokens].double()
        places = gradient[self.places][self.first : self.first + self.form.length].double()
        squares = table.square().sum(1)
        # Most tokens are not in a batch: the median row is noise.
        noise = float(squares.median()) / table.shape[1]
        spread = math.sqrt(2 / table.shape[1])
        tokens = (squares > noise * table.shape[1] * (1 + PRESENT * spread)).nonzero().flatten()
        noisy = noise * table.shape[1] > CLEAN * float(squares.max())
        holes = bool((table[tokens] == 0).any()) if len(tokens) else False
        return Rows(table[tokens], tokens.tolist(), places, noise, self.form, table if noisy or holes else None)


@dataclass(frozen=True, eq=False)
class Rows:
    """The gradient of every token that was used, and of every place."""

    of_tokens: Tensor  # (T, width)
    tokens: list[int]
    of_places: Tensor  # (P, width)
    noise: float  # variance of an entry
    form: TextForm
    every: Tensor | None = None  # the rows of the whole vocabulary, where these are noisy or have holes

    def stands_at(self) -> Tensor:
        """How much of each place's row is in each token's: (T, P), 1 where the one sentence has the token there."""
        return _divided(self.of_tokens, self.of_places, self.noise)

    def sentence(self) -> tuple[int, ...]:
        """The tokens of the one sentence in their order."""
        if self.every is not None:
            found = by_agreement(self.every, self.of_places, self.form)
            return found or likeliest(self.every, self.of_places, self.noise, self.form)
        if not self.tokens:
            return ()
        share = self.stands_at()
        before, behind = self.form.ends
        length = self._length(share)
        numbers = torch.tensor(self.tokens)
        inner = torch.tensor([token not in self.form.special for token in self.tokens])
        made = [int(numbers[share[:, place].argmax()]) for place in range(length)]
        if bool(inner.any()):
            for place in range(len(before), length - len(behind)):
                made[place] = int(numbers[inner][share[inner, place].argmax()])
        for place, token in enumerate(before):
            made[place] = token
        for place, token in enumerate(behind):
            made[length - len(behind) + place] = token
        return tuple(made)

    def _length(self, share: Tensor) -> int:
        """Up to where the token stands that ends a sentence; without one, up to the last place above the noise."""
        before, behind = self.form.ends
        least = len(before) + len(behind)
        if behind and behind[-1] in self.tokens:
            return max(least, int(share[self.tokens.index(behind[-1])].argmax()) + 1)
        squares, width = self.of_places.square().sum(1), self.of_places.shape[1]
        active = (squares > self.noise * width * (1 + PRESENT * math.sqrt(2 / width))).nonzero().flatten()
        return max(least, int(active[-1]) + 1 if len(active) else least)

    def options(self, most: int) -> list[list[int]]:
        """The tokens that may stand at each place in a batch, by how much of its row they explain."""
        if not self.tokens:
            return [[] for _ in range(len(self.of_places))]
        share = _divided(self.of_places, self.of_tokens, self.noise)  # (P, T)
        before, behind = self.form.ends
        found = []
        for place, own in enumerate(share):
            values, order = own.sort(descending=True)
            likely = [self.tokens[i] for i in order[:most][values[:most] > LEAST].tolist()]
            ends = [token for token in (before if place < len(before) else behind) if token not in likely]
            found.append([*likely, *ends] if likely else ends)
        return found


def _divided(what: Tensor, into: Tensor, noise: float) -> Tensor:
    """The shares in which rows (N, n) are made of others (M, n): (N, M), by least squares that knows the noise."""
    inner = into @ into.T
    ridge = noise * into.shape[1] + 1e-12 * float(inner.diagonal().max())
    shares: Tensor = torch.linalg.solve(inner + ridge * torch.eye(len(into), dtype=inner.dtype), into @ what.T).T
    return shares


def _place_table(public: Public, weights: Mapping[str, Tensor], form: TextForm) -> str | None:
    """The parameter with the embedding of every place: the table that is asked with 0, 1, 2, ... from the first on."""
    assert isinstance(public.model, TextModel)
    length = min(3, form.length)
    wanted = public.model.first_place + torch.arange(length)
    asked: list[nn.Module] = []

    def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given and given[0].shape[-1] == length and bool((given[0] == wanted).all()):
            asked.append(module)

    names: dict[nn.Module, str] = {
        module: name for name, module in public.model.named_modules() if isinstance(module, nn.Embedding)
    }
    handles = [module.register_forward_pre_hook(note) for module in names]
    try:
        with torch.no_grad():
            inputs = form.inputs(torch.full((1, length), float(form.entries - 1)))
            functional_call(public.model, dict(weights), (), inputs)
    finally:
        for handle in handles:
            handle.remove()
    found = [f"{names[module]}.weight" for module in asked]
    return next((name for name in found if name != public.model.table_name), None)
