"""A comparison of defenses on one task: the document that is saved, shown and drawn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal

import pydantic

from fedveil.auditing.result import Document, Estimate, Question, Status
from fedveil.auditing.roles import Role
from fedveil.errors import FedveilError
from fedveil.fields import problems
from fedveil.files import writable_folder, write_atomically
from fedveil.study.tables import Table, as_csv, as_latex, as_markdown, as_text
from fedveil.tasks.measures import Measure, measure

FILE = "comparison.json"
QUESTIONS: dict[Question, str] = {
    "reconstruct": "Can an example be rebuilt?",
    "link": "Can an update be linked to a known example?",
    "member": "Can it be told whether an example was used?",
}


class Leak(Document):
    """What one attacker gets by the measure that decides about a question."""

    measure: str
    found: Estimate
    attack: str  # that got most, or `TOGETHER`


class Point(Document):
    """A defense at one strength, over all seeds."""

    family: str  # as it was asked for; "" without any defense
    defense: str  # as the command line writes it
    settings: dict[str, dict[str, Any]]  # of every defense of the chain, by name, defaults too
    moved: str = ""  # what the sweep set: "keep=0.5"; "" where the defense is taken as it is
    utility: Estimate
    loss: Estimate | None = None  # utility with the defense minus without
    slowdown: float | None = None
    leaks: dict[Question, dict[Role, Leak]]
    metrics: dict[Role, dict[str, Estimate]]  # of reconstructions, all metrics by role
    statuses: dict[Question, Status] = {}
    guarantee: str = ""
    formal: bool = False
    informed: bool = True  # whether the defense says what an attacker who knows it would do
    front: list[Question] = []  # the questions for which no other point is better in both
    pictures: str = ""  # whose reconstructions are shown: "inverting-gradients, knows the defense"

    def leaked(self, question: Question) -> Leak | None:
        """What the stronger of the attackers gets, who knows the defense or does not."""
        found = [each for role, each in self.leaks.get(question, {}).items() if role in ("naive", "adaptive")]
        found = found or [each for role, each in self.leaks.get(question, {}).items() if role == "ceiling"]
        return max(found, key=lambda each: each.found.mean, default=None)


class Comparison(Document):
    """Defenses at several strengths on one task. Pictures are kept apart."""

    format: Literal["fedveil-comparison-1"] = "fedveil-comparison-1"
    data: str
    model: str
    modality: str
    protocol: str
    attacked: str
    rounds: int
    utility: str  # the name of the measure
    candidates: int
    seeds: list[int]
    attacks: list[str]
    undefended: Point
    points: list[Point]
    floors: dict[Question, Leak]  # what a guess without the update gets
    left_out: dict[str, str] = {}  # defenses that cannot be used on this task, and why
    warnings: list[str] = []
    command: str
    config: dict[str, Any]
    versions: dict[str, str]
    started: str
    seconds: float = 0.0

    @property
    def questions(self) -> list[Question]:
        """Those that were asked."""
        return [question for question in QUESTIONS if self.undefended.leaks.get(question)]

    @property
    def measured(self) -> Measure:
        """How utility is read."""
        return measure(self.utility)

    def table(self) -> Table:
        """One row for each point."""
        from fedveil.study.comparison_table import table_of

        return table_of(self)

    def __str__(self) -> str:
        return as_text(self.table())

    def markdown(self) -> str:
        """The table in Markdown."""
        return as_markdown(self.table())

    def latex(self) -> str:
        """The table in LaTeX (booktabs)."""
        return as_latex(self.table())

    def records(self) -> list[dict[str, Any]]:
        """Every number, one line each: point, question or metric, role, mean, low, high."""
        from fedveil.study.comparison_table import records_of

        return records_of(self)

    def csv(self, path: Path | str) -> Path:
        """Write the records as CSV."""
        path = Path(path)
        writable_folder(path.parent)
        write_atomically(path, as_csv(self.records()).encode())
        return path

    def frame(self) -> Any:
        """The records as a pandas DataFrame."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise FedveilError("frame() needs pandas: pip install pandas (csv(path) does without)") from None
        return pandas.DataFrame(self.records())


def read_comparison(folder: Path) -> Comparison:
    """Read what was saved; anything else raises a `FedveilError`."""
    try:
        return Comparison.model_validate_json((folder / FILE).read_bytes())
    except OSError:
        raise FedveilError(
            f"{folder} holds no comparison: no {FILE} (write one with `fedveil compare --out`)"
        ) from None
    except pydantic.ValidationError as error:
        raise FedveilError(f"{folder / FILE} is not a valid comparison: {problems(error)}") from None
