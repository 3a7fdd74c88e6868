"""What the attacks share that match gradients in the space of token embeddings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedveil.attacks.embedding_space import in_embeddings
from fedveil.attacks.embeddings import EmbeddingNorm, Embeddings
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.lab import Lab
from fedveil.attacks.language import NONE, TRAINED_HERE, is_corpus, language_of, learned
from fedveil.attacks.match import MatchName
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.problem import Problem
from fedveil.attacks.rearranging import Rearranging
from fedveil.attacks.recipe import LabelsFrom, Phase, Recipe
from fedveil.attacks.scene import Scene
from fedveil.attacks.sentence_lengths import read_lengths
from fedveil.attacks.threat import ThreatModel
from fedveil.errors import FedveilError
from fedveil.fields import Count, Positive
from fedveil.tasks.formats.lines import read_lines
from fedveil.tasks.models.transformer import TextModel

LengthsFrom = Literal["known", "read"]


class TextMatching(GradientMatching):
    """Base of the attacks that move embeddings of tokens until their gradient looks like the observed one.

    The search starts from the best of many random starts, and hands in the nearest tokens.
    """

    modalities: ClassVar[tuple[str, ...]] = ("sentences",)
    revision: ClassVar[int] = 1

    steps: Count
    lr: Positive
    starts: Count
    restarts: Count
    labels: LabelsFrom
    lengths: LengthsFrom

    @abstractmethod
    def cost(self) -> MatchName:
        """How updates are compared."""

    def search(self) -> Rearranging:
        """How embeddings are moved."""
        return Rearranging(lr=self.lr, starts=self.starts, moves=0, fluency=0.0)

    def norm_weight(self) -> float:
        """The weight of the prior on the length of embeddings."""
        return 0.0

    @property
    def language_name(self) -> str:
        """Of the language prior."""
        return NONE

    def recipe(self) -> Recipe:
        """Adam from the best start."""
        priors = (EmbeddingNorm(self.norm_weight()),) if self.norm_weight() else ()
        phases = (Phase(self.steps, self.search()),)
        return Recipe(self.cost(), Embeddings(), priors, (phases,) * self.restarts, self.labels)

    # ---- what it is given ------------------------------------------------------------------------------------

    @property
    def needs(self) -> frozenset[str]:
        """Also lengths of sentences, unless it reads them off; and sentences that a language prior learns from."""
        lengths = {"lengths"} if self.lengths == "known" else set()
        return super().needs | lengths | ({"auxiliary"} if self.language_name in TRAINED_HERE else set())

    @property
    def brings(self) -> str:
        """A language model from elsewhere, or text to make one of."""
        if self.language_name in (NONE, *TRAINED_HERE):
            return ""
        made = "an n-gram model of the text" if is_corpus(self.language_name) else "the language model"
        return f"{made} {self.language_name}"

    @property
    def threat(self) -> ThreatModel:
        """With the language model, and how lengths are got."""
        model = super().threat
        has = (*model.has, self.brings) if self.brings else model.has
        may = model.may if self.lengths == "known" else (*model.may, "reads the number of tokens off the update")
        return replace(model, has=has, may=may)

    learns_about: ClassVar[frozenset[str]] = frozenset()

    @property
    def learning(self) -> list[Any]:
        """Only the language prior is learned."""
        name = self.language_name
        text = [sha256(Path(name).expanduser().read_bytes()).hexdigest()] if is_corpus(name) else []
        return ["language", name, *text]

    def fit(self, lab: Lab) -> dict[str, Tensor] | None:
        """Train the language prior on auxiliary sentences, or on the text that was named."""
        return learned(self.language_name, lab) or None

    def check(self, scene: Scene) -> None:
        """Refuse what is no model of classes of sentences, and several local steps."""
        model = scene.public.model
        if not isinstance(model, TextModel) or scene.public.layout.text is None:
            raise FedveilError(f"{self.name} searches for embeddings of a text model, and this is none")
        if model.causal:
            raise FedveilError(f"{self.name} needs classes, and running text has none: use token-span")
        if is_corpus(self.language_name):
            read_lines(Path(self.language_name).expanduser())
        super().check(scene)

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        """Match the update of every victim, given what there is to know of its sentences."""
        if self.lengths == "known" and scene.lengths is None:
            raise FedveilError(f"{self.name}: the lengths of the sentences are not known here: use lengths=read")
        return super().run(scene, fitted)

    def problem_of(self, scene: Scene, fitted: Mapping[str, Tensor] | None = None) -> Problem:
        """In the space of embeddings."""
        form = scene.public.layout.text
        assert form is not None
        language = None
        if fitted is not None or not (self.language_name in TRAINED_HERE or is_corpus(self.language_name)):
            language = language_of(self.language_name, fitted or {}, form)
        return in_embeddings(Problem.of(scene), scene, self._lengths(scene), language)

    def _lengths(self, scene: Scene) -> Tensor:
        """(V, B); of a scene that stands in for others, the most there can be."""
        if self.lengths == "read":
            return read_lengths(scene)
        if scene.lengths is not None:
            return scene.lengths
        assert scene.public.layout.text is not None
        return torch.full((scene.count, scene.batch_size), scene.public.layout.text.length)
