"""The base of named attacks: a declared class that turns its fields into the engine's choices."""

from __future__ import annotations

from typing import ClassVar

from fedveil.attacks.matching import Matching, attack_seconds, match, steps_in_all
from fedveil.attacks.problem import Problem, Reconstruction
from fedveil.attacks.tracking import Counter, Progress
from fedveil.clients.engine import Backend
from fedveil.errors import FedveilError
from fedveil.progress import reporting
from fedveil.workers import Workers, tick


class Attack:
    """An attack recovers a batch from what was shared. A named matching attack overrides `choices` only."""

    name: ClassVar[str] = "attack"  # set by the registry
    paper: ClassVar[str] = ""

    def choices(self) -> Matching:
        """This attack as choices of the matching engine."""
        raise FedveilError(f"the attack {type(self).__name__} says nothing of what it does: override choices, or run")

    def run(
        self,
        problem: Problem,
        *,
        backend: Backend = "auto",
        progress: Progress | bool | None = None,
        workers: Workers | None = None,
    ) -> Reconstruction:
        """Attack every victim of a problem, shared out among worker processes where there are some.

        progress: a function that is told (steps done, in all); True or False shows a bar or none; by default there is
            one on a terminal and in a notebook.
        """
        with reporting(progress, f"attacking with {self.name}") as report:
            return self._run(problem, backend, report, workers)

    def _run(self, problem: Problem, backend: Backend, report: Progress, workers: Workers | None) -> Reconstruction:
        if workers is None or problem.count == 1 or not workers.worth(lambda: attack_seconds(problem, self.choices())):
            return match(problem, self.choices(), backend=backend, progress=report)
        size = -(-problem.count // workers.count)
        parts = [problem.rows(slice(start, start + size)) for start in range(0, problem.count, size)]
        counter = Counter(report, sum(steps_in_all(part, self.choices()) for part in parts))
        jobs = [(part, self.choices(), backend) for part in parts]
        return Reconstruction.concat(list(workers.map(_work, jobs, counter.add)))


def _work(job: tuple[Problem, Matching, Backend]) -> Reconstruction:
    problem, choices, backend = job
    return match(problem, choices, backend=backend, progress=lambda done, total: tick())
