"""Sentences as a matching attack moves them: embeddings, that are free where a token is searched for.

The engine sees a problem like any other, whose inputs are embeddings (B, places, width). The model in it takes these in
place of tokens. Which places hold a token, and the special tokens that begin and end each sentence, are buffers of the
victim. The table of embeddings itself is not matched: it has no gradient at embeddings that are no token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedveil.attacks.iterates import Iterates
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import Scene
from fedveil.errors import FedveilError
from fedveil.tasks.models.transformer import TextModel
from fedveil.tasks.text_form import NO_TOKEN, TextForm

if TYPE_CHECKING:
    from fedveil.attacks.language import Language

FREE = -2  # where a token is searched for
THERE, GIVEN, SEARCHED = "places that hold a token", "embeddings that are given", "places that are searched"
AT_ONCE = 2**24  # similarities of embeddings with the table that are computed at a time


class EmbeddedText(TextModel):
    """A model of text as a function of embeddings (B, places, width); what is given of them is put in their place."""

    def __init__(self, model: TextModel, batch_size: int, places: int) -> None:
        super().__init__(model.network, causal=model.causal, first_place=model.first_place)
        self.register_buffer(THERE, torch.ones(batch_size, places))
        self.register_buffer(GIVEN, torch.zeros(batch_size, places, model.width))
        self.register_buffer(SEARCHED, torch.ones(batch_size, places, 1))

    def forward(self, embeddings: Tensor) -> Tensor:  # type: ignore[override]
        """The scores of the classes (B, classes)."""
        there, given, searched = (getattr(self, name) for name in (THERE, GIVEN, SEARCHED))
        return self.of_embeddings(searched * embeddings + given, there)


@dataclass(frozen=True, eq=False)
class EmbeddingSpace:
    """What is known of V victims' sentences before the search, and how embeddings are read as tokens."""

    form: TextForm
    table: Tensor  # (entries, width)
    tokens: (
        Tensor  # (V, B, places): special tokens where they are known, FREE where one is searched for, NO_TOKEN behind
    )
    language: Language | None = None  # what sentences are like, where a search asks for it

    @classmethod
    def of(cls, form: TextForm, table: Tensor, lengths: Tensor, language: Language | None = None) -> Self:
        """That of sentences of known lengths (V, B), special tokens included."""
        before, behind = form.ends
        places = torch.arange(int(lengths.max()))
        tokens = torch.where(places < lengths[..., None], FREE, NO_TOKEN)
        for place, token in enumerate(before):
            tokens[..., place] = token
        for place, token in enumerate(behind):
            tokens.scatter_(2, lengths[..., None] - len(behind) + place, token)
        return cls(form, table.detach(), tokens, language)

    def rows(self, index: slice | Sequence[int] | Tensor) -> EmbeddingSpace:
        """Those of some victims."""
        return replace(self, tokens=self.tokens[index])

    @cached_property
    def directions(self) -> Tensor:
        """Of all embeddings in the table."""
        return normalize(self.table, dim=1)

    @property
    def norm(self) -> float:
        """The mean length of an embedding in the table."""
        return float(self.table.norm(dim=1).mean())

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What the model is given of every victim."""
        free = self.tokens == FREE
        there = self.tokens != NO_TOKEN
        given = self.table[self.tokens.clamp_min(0)] * (there & ~free)[..., None]
        return {THERE: there.to(self.table), GIVEN: given, SEARCHED: free[..., None].to(self.table)}

    def stretches(self) -> list[list[tuple[int, int]]]:
        """From where to where tokens are searched in each sentence of every victim."""
        free = self.tokens == FREE
        starts, sizes = free.int().argmax(-1), free.sum(-1)
        return [
            [(s, s + n) for s, n in zip(*own, strict=True)] for own in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def nearest(self, embeddings: Tensor) -> Tensor:
        """The tokens whose embeddings point most nearly where these (..., width) do; never a special one."""
        rows, table = normalize(embeddings.reshape(-1, embeddings.shape[-1]), dim=1), self.directions
        barred = torch.tensor(sorted(self.form.special), dtype=torch.long, device=table.device)
        step, found = max(1, AT_ONCE // len(table)), []
        for start in range(0, len(rows), step):
            alike = rows[start : start + step] @ table.T
            alike[:, barred] = -torch.inf
            found.append(alike.argmax(1))
        return torch.cat(found).reshape(embeddings.shape[:-1])

    def read(self, embeddings: Tensor) -> Tensor:
        """Sentences (V, B, length) of embeddings (V, B, places, width): the nearest tokens, and what is given."""
        broken = ~torch.isfinite(embeddings).all(-1)
        clean = torch.nan_to_num(embeddings, nan=0.0, posinf=0.0, neginf=0.0)
        found = torch.where(self.tokens == FREE, self.nearest(clean), self.tokens).to(embeddings.dtype)
        found = found.masked_fill(broken, torch.nan)  # of a search that diverged
        made = found.new_full((*found.shape[:2], self.form.length), float(NO_TOKEN))
        made[..., : found.shape[2]] = found
        return made

    def read_all(self, iterates: Sequence[Tensor]) -> Iterates:
        """The sentences on the way of a search, in a file of their own."""
        sizes = (*self.tokens.shape[:2], self.form.length)
        found = Iterates.empty(len(iterates), sizes)
        for step, embeddings in enumerate(iterates):
            found.put(step, self.read(embeddings.to(self.table)))
        return found

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings (V, B, places, width) of sentences (V, B, length) as `read` gives them."""
        return self.table[tokens[..., : self.tokens.shape[2]].round().long().clamp_min(0)]


def in_embeddings(problem: Problem, scene: Scene, lengths: Tensor, language: Language | None = None) -> Problem:
    """The problem of a scene of text, in which embeddings are searched for."""
    form, model = scene.public.layout.text, scene.public.model
    if form is None or not isinstance(model, TextModel):
        raise FedveilError("embeddings are searched for in a text model, and this is none")
    name, params = model.table_name, problem.params.row(0)
    table = params[name] if name in params else dict(model.named_parameters())[name]
    space = EmbeddingSpace.of(form, table, lengths, language)
    sizes = problem.batch_size, space.tokens.shape[2]
    found = replace(problem, text=space, left_out=(name,))
    return replace(
        found,
        model=EmbeddedText(model, *sizes),
        params=found.without_left_out(problem.params),
        buffers=type(problem.buffers)({**problem.buffers, **space.buffers}),
        target=found.without_left_out(problem.target),
        weight=found.without_left_out(problem.weight),
        views=tuple(found.without_left_out(view) for view in problem.views),
        shape=(sizes[1], model.width),
    )
