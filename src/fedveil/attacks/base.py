"""The extension point: an attack makes a finding of what was shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedveil.attacks.finding import Finding, Question
from fedveil.attacks.lab import Lab
from fedveil.attacks.scene import Scene
from fedveil.attacks.threat import ThreatModel


@dataclass(frozen=True)
class Work:
    """How much an attack has to do, for progress and the time left."""

    steps: int = 1  # that the scene's workbench will be told of
    seconds: float = 0.0  # estimated, on one core
    fit_seconds: float = 0.0  # the same for `fit`, of an attack that learns


class Attack:
    """Base of all attacks: a declared class that overrides `run`, and `fit` if it learns.

    An attack that matches gradients derives from `GradientMatching` and gives its recipe instead.
    """

    name: ClassVar[str] = "attack"  # set by the registry
    paper: ClassVar[str] = ""
    question: ClassVar[Question] = "reconstruct"  # what its finding answers
    modalities: ClassVar[tuple[str, ...]] = ("pictures",)  # the kinds of data that it takes; () for any
    looks_at: ClassVar[Literal["updates", "model"]] = "updates"  # "model": the one that the training came to, alone
    revision: ClassVar[int] = 1  # raised with every change that makes it find something else
    # What `fit` looks at beside auxiliary data. Without "defense" its lab has none; what it learns without "model" is
    # kept for every model; with "training" it may train as the federation does.
    learns_about: ClassVar[frozenset[str]] = frozenset({"model", "defense"})

    @property
    def needs(self) -> frozenset[str]:
        """What it must be given: "auxiliary", "batch of one", "candidates", "classes", "labels", "lengths", ..."""
        return frozenset()

    @property
    def labels_from(self) -> str | None:
        """Where it gets labels: "known", "idlg", "recovered" or "optimized"; None if it uses none."""
        return None

    @property
    def content(self) -> str:
        """A hash of the files that it reads, if its fields name any: what was kept of other files is not taken."""
        return ""

    @property
    def brings(self) -> str:
        """What it has from elsewhere, in words: a generator in a file that one of its fields names."""
        return ""

    @property
    def learning(self) -> list[Any] | None:
        """What alone decides what `fit` learns, if not all fields do: attacks in which it is equal share that."""
        return None

    @property
    def threat(self) -> ThreatModel:
        """What it knows, has and may do, whoever runs it; what a role adds (knowing the defense) is not in here."""
        return ThreatModel.of(self.needs, self.labels_from)

    def check(self, scene: Scene) -> None:
        """Refuse a scene that this attack cannot work on, before any long work. Its updates may be stand-ins."""

    def fit(self, lab: Lab) -> Any:
        """Learn from auxiliary data, before any victim is seen. What it returns is handed to `run`, and is kept.

        It must be None, or a dict of tensors by name.
        """
        return None

    def run(self, scene: Scene, fitted: Any = None) -> Finding:
        """Attack every victim of a scene."""
        raise NotImplementedError  # every attack defines its own

    def estimate(self, scene: Scene) -> Work:
        """How much `run` has to do, and `fit` before it. The scene may be a stand-in: only its form counts."""
        return Work()

    def pieces(self, scene: Scene) -> list[Scene]:
        """Parts of the victims that can be attacked on their own, in any process, with the same finding to the bit."""
        return [scene]
