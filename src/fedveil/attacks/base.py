"""The base of named attacks: a declared class that turns its fields into the engine's choices."""

from __future__ import annotations

from typing import ClassVar

from fedveil.attacks.matching import Matching, match
from fedveil.attacks.problem import Problem, Reconstruction
from fedveil.attacks.tracking import Progress
from fedveil.clients.engine import Backend


class Attack:
    """An attack recovers a batch from what was shared. A named matching attack overrides `choices` only."""

    name: ClassVar[str] = "attack"  # set by the registry
    paper: ClassVar[str] = ""

    def choices(self) -> Matching:
        """This attack as choices of the matching engine."""
        raise NotImplementedError  # each named attack defines its own

    def run(self, problem: Problem, *, backend: Backend = "auto", progress: Progress | None = None) -> Reconstruction:
        """Attack every victim of a problem."""
        return match(problem, self.choices(), backend=backend, progress=progress)
