"""What an audit found: plain data that is saved as `result.json` and `images.safetensors`, and reported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fedveil.attacks.threat import ThreatModel
from fedveil.auditing.roles import Role
from fedveil.errors import FedveilError
from fedveil.fields import Probability, problems
from fedveil.leakage.membership import AUC
from fedveil.leakage.modalities import modality
from fedveil.leakage.modality import LINKED, Modality
from fedveil.tasks.client_labels import ClientLabels

# What can be asked of an update: can what is behind it be rebuilt, can it be linked to a known record, can it be told
# whether a record was used, in an update or in the training of the model?
Question = Literal["reconstruct", "link", "member"]

Status = Literal["exposed", "partly exposed", "no leakage found by these attacks", "not judged"]

Which = Literal["defended", "undefended"]  # of two runs: with the defense, and without

TOGETHER = "all attacks together"  # in the place of an attack's name: for each example the attack that got most


class Document(BaseModel):
    """Base of the parts of a result."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Estimate(Document):
    """A mean with its bootstrap 95 % interval and the number of values behind it."""

    mean: float
    low: float
    high: float
    count: int


class Roc(Document):
    """Which share of the members a test finds, against the share of others that it takes for members; both rise."""

    false_alarms: list[float]
    found: list[float]
    others: int  # examples that were not used, behind the false alarms


class Row(Document):
    """One line of the table of numbers: who attacked, and every metric with its interval."""

    attack: str  # registered name; "" where no attack is run (mean image, perturbed input), or `TOGETHER`
    role: Role
    question: Question = "reconstruct"
    metrics: dict[str, Estimate]
    values: dict[str, list[float]]  # metric -> one value per example, or per update where they are linked
    round: int | None = None  # the attacked round; None: all attacked rounds together
    strongest: bool = False  # the attacker of the defended updates that gets most, of those who ask this question
    bound: Probability | None = None  # link: how often any attacker may pick the right one, by the formal guarantee
    bounds: dict[str, Probability] = {}  # member: by metric, the most that any attacker may get by the guarantee
    of_model: bool = False  # member: whether the trained model was looked at, and not single updates
    curve: Roc | None = None  # member
    exact: bool | None = None  # link: whether updates were compared by the exact likelihood under the defense
    threat: ThreatModel | None = None  # what the attacker has; None in results of versions that did not keep it
    # Of `TOGETHER`: for every example, or update, the attack that got most; of no other row.
    winners: list[str] = []

    def allowed(self, measure: str) -> float | None:
        """The most that any attacker may get by this measure, as far as a formal guarantee says so."""
        return self.bounds.get(measure, self.bound)


class Answer(Document):
    """One question that an audit asks, its answer, and the numbers behind it."""

    question: Question
    asked: str  # "Can a picture be rebuilt from an update?"
    status: Status
    why: str  # how the status follows from the numbers and the printed thresholds
    sentence: str = ""  # what was found; "" where no attack asks this
    # The row that the sentence is about, the metric that it was judged by, and the floor that it was judged against.
    role: Role | None = None
    attack: str = ""
    winner: str = ""  # of several attacks, the one that won most often; "" where none picked anything
    round: int | None = None
    measure: str = ""
    floor: Role | None = None
    found: Estimate | None = None
    undefended: Estimate | None = None
    guess: Estimate | None = None  # of the floor: what is got without the update
    bound: Probability | None = None  # see `Row.bound`
    recognizable: Estimate | None = None  # reconstruct: the share that a person would recognize
    next_step: str = ""  # what would settle an open question
    command: str = ""  # the same as a command


class Warned(Document):
    """A remark on the verdict, loud where it must not be overlooked."""

    words: str
    loud: bool = False


class Verdict(Document):
    """A status word and a few sentences, with the answers that they come from."""

    status: Status  # of the worst answer
    question: Question = "reconstruct"  # which one that is
    sentences: list[str]  # what leaks, the worst first; then the cost, and the formal guarantee
    why: str
    answers: list[Answer] = []  # one for each question
    warnings: list[Warned] = []
    notes: list[str] = []  # what the words of the sentences mean
    thresholds: list[str] = []  # as set for this audit
    next_step: str = ""
    command: str = ""

    def answer(self, question: Question) -> Answer | None:
        """The answer to one question; None in results that do not hold it."""
        return next((each for each in self.answers if each.question == question), None)

    @property
    def lead(self) -> Answer | None:
        """The answer that the status is of."""
        return self.answer(self.question)


class RoundUtility(Document):
    """Utility after one round (round 0: before training) on test examples; None where it was not measured."""

    round: int
    defended: float | None
    undefended: float | None
    # The same on the validation part, and on a sample of at most 1,000 training examples.
    validation: dict[Which, float] = {}
    train: dict[Which, float] = {}

    def parts(self) -> dict[str, dict[Which, float]]:
        """What was measured, by the part of the data and by whether the defense was on."""
        test: dict[Which, float | None] = {"defended": self.defended, "undefended": self.undefended}
        known = {which: value for which, value in test.items() if value is not None}
        return {"test": known, "validation": self.validation, "train": self.train}


class Cost(Document):
    """What the defense cost. Empty (`rounds` = 0) when the audit did not train."""

    metric: str = "accuracy"  # of the test split: see `tasks.measures`
    rounds: int = 0
    defended: Estimate | None = None
    undefended: Estimate | None = None
    difference: Estimate | None = None  # defended - undefended, paired on the same test examples
    others: dict[str, dict[Literal["defended", "undefended"], float]] = {}  # other test measures of the same model
    # Test utility of other models than the federation's, such as "local models before the upload", where measured.
    beside: dict[str, dict[Literal["defended", "undefended"], float]] = {}
    history: list[RoundUtility] = []
    seconds_per_round: dict[Literal["defended", "undefended"], float] = {}
    slowdown: float | None = None  # time of a round with the defense / without
    slowdown_interval: Estimate | None = None  # of the same, from the spread of the rounds; None with too few rounds
    chance: float | None = None  # accuracy of guessing blindly
    majority: float | None = None  # utility of always giving the best same answer: the most frequent class, the mean
    bytes_per_round: dict[Literal["up", "down"], int] = {}  # of one client


class CostCurve(Document):
    """Matching cost against the attack's steps, over all victims."""

    attack: str
    role: Role
    steps: list[int]
    median: list[float]
    low: list[float]  # lower and upper quartile
    high: list[float]


class AttackRun(Document):
    """How one attack went."""

    attack: str
    question: Question = "reconstruct"
    settings: dict[str, Any]
    seconds: float
    restarts: int | None = None  # None, as steps: the attack has none
    steps: int | None = None
    victims: int
    batch_size: int
    label_recovery: Estimate | None = None  # share of labels read off rightly; None where they were given
    curves: list[CostCurve] = []
    # Role -> metric -> after which share of the steps ("1/3", "2/3", "all").
    on_the_way: dict[Role, dict[str, dict[str, Estimate]]] = {}


class AuxiliaryData(Document):
    """What attackers learned from."""

    source: str  # "mnist"
    part: str  # "held-out test images"
    used: int
    dropped: int = 0  # which the task holds too
    left: int = 0  # beyond the most that are used


class Assumption(Document):
    """One switch of the threat model in plain words."""

    switch: str  # "labels"
    setting: str  # "known"
    words: str  # "The attacker knows the labels of the batch; they can usually be read off the last layer."


class DefenseCard(Document):
    """What the reader should know of the defense."""

    name: str
    settings: dict[str, Any]
    spelled: str  # as the command line writes it
    summary: str  # what it does in two sentences
    acts_on: str  # "the gradient of every step"
    guarantee: str  # one honest sentence
    formal: bool  # whether it is a formal guarantee at all
    weaknesses: list[str]
    paper: str
    uninformed: list[str] = []  # defenses that do not say what an attacker who knows them would do
    facts: dict[str, str] = {}  # measured or predicted quantities of this run: "cosine to the true gradient": "0.84"


class Provenance(Document):
    """All that is needed to do it again."""

    command: str
    config: dict[str, Any]
    seed: int
    versions: dict[str, str]
    machine: str
    hashes: dict[str, str]  # "data", "model" -> SHA-256
    started: str  # ISO date and time, UTC
    seconds: float


class TableColumn(Document):
    """A column of a table that was attacked."""

    name: str
    categories: list[str] = []  # empty: it holds numbers
    std: float = 1.0


class TableLegend(Document):
    """What the cells of attacked rows mean: see `Records.legend`."""

    columns: list[TableColumn]
    tolerance: float  # standard deviations within which a number counts as recovered


class TextLegend(Document):
    """How the tokens of attacked sentences are written: see `Sentences.pieces`."""

    pieces: dict[str, str]  # token -> text, with a space before it where it begins a word
    special: list[int] = []  # tokens that stand for no text


class Result(Document):
    """The whole finding. Images are kept apart, see `Images`."""

    format: Literal["fedveil-result-2"] = "fedveil-result-2"
    modality: str = "pictures"  # the kind of data, by its name in `MODALITIES`
    data: str
    model: str
    protocol: str  # "FedSGD, 4 clients, batch 8"
    attacked: str = ""  # "16 updates of one image each, at the untrained model"
    table: TableLegend | None = None  # where rows of a table were attacked
    text: TextLegend | None = None  # where sentences were attacked
    label_names: list[str] = []  # of the classes, where they have names
    holdings: ClientLabels | None = None  # who holds what; None in results of versions that did not keep it
    defense: DefenseCard
    verdict: Verdict
    rows: list[Row]
    suite: str = ""  # whose attacks were run; "" where they were named one by one
    auxiliary: AuxiliaryData | None = None  # None where no attack learned from any
    candidates: int  # from which the right one is picked: the original and its distractors
    judges: list[str] = []  # networks that compared the pictures: how they were made, how good they are
    cost: Cost
    attacks: list[AttackRun]
    assumptions: list[Assumption]
    not_given: list[str]  # what the attacker was not given
    not_tried: list[str]  # what was not tried
    provenance: Provenance

    def row(
        self, role: Role, attack: str | None = None, *, round: int | None = None, question: Question = "reconstruct"
    ) -> Row | None:
        """The row of a role, or None: of the attack that gets most, or of the one named.

        round: one attacked round; None: all of them together.
        """
        rows = [
            row
            for row in self.rows
            if (row.role, row.round, row.question) == (role, round, question)
            and (row.attack == attack if attack is not None else row.attack != TOGETHER)
        ]
        kind = modality(self.modality)
        return max(rows, key=lambda row: gets(row, kind), default=None)


def measures(question: Question, kind: Modality) -> tuple[str, ...]:
    """The shares that decide about a question."""
    return {"reconstruct": kind.headline, "link": (LINKED,), "member": (AUC,)}[question]


def gets(row: Row, kind: Modality) -> tuple[float, float]:
    """How much a row gets, to compare it with others: its share, then how near it comes to the originals."""
    shares = (row.metrics[name].mean for name in measures(row.question, kind) if name in row.metrics)
    near = row.metrics[kind.nearness].mean if kind.nearness in row.metrics else -math.inf
    return max(shares, default=-math.inf), near


class Images:
    """The originals and reconstructions of a result: pictures (images, channels, h, w) of floats in [0, 1].

    Of a table, cells (rows, columns): numbers, and the place of each category in its column's list. Of text, tokens
    (sentences, places), -1 where there is none.
    """

    def __init__(self, originals: NDArray[np.float32], labels: NDArray[Any]) -> None:
        self.originals = originals
        self.labels = labels  # whole class numbers (images,), zeros and ones (images, labels), or floating numbers
        self.reconstructions: dict[tuple[str, Role], NDArray[np.float32]] = {}  # by (attack, role)


def save_result(result: Result, images: Images, folder: Path) -> None:
    """Write `result.json` and `images.safetensors` into a folder, each at once or not at all."""
    from fedveil.files import write_atomically
    from fedveil.tensors import write_safetensors  # imports torch, which reading a result does not need

    tensors: dict[str, NDArray[Any]] = {
        "originals": np.ascontiguousarray(images.originals, dtype=np.float32),
        "labels": np.ascontiguousarray(images.labels),
    }
    for (attack, role), pictures in images.reconstructions.items():
        tensors[f"reconstruction/{attack}/{role}"] = np.ascontiguousarray(pictures, dtype=np.float32)
    write_safetensors(folder / "images.safetensors", tensors)
    write_atomically(folder / "result.json", result.model_dump_json(indent=1).encode())


def load_result(folder: Path) -> tuple[Result, Images]:
    """Read what `save_result` wrote, now or in an earlier version; anything else raises a `FedveilError`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    from fedveil.auditing.earlier import upgraded

    try:
        result = Result.model_validate_json(upgraded((folder / "result.json").read_bytes()))
        tensors = load((folder / "images.safetensors").read_bytes())
        images = Images(tensors.pop("originals"), tensors.pop("labels"))
    except FileNotFoundError as error:
        raise FedveilError(
            f"{folder} holds no result: no {Path(str(error.filename)).name} (write one with `fedveil audit --out`)"
        ) from None
    except pydantic.ValidationError as error:
        raise FedveilError(f"{folder / 'result.json'} is not a fedveil result: {problems(error)}") from None
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise FedveilError(f"{folder / 'images.safetensors'} is damaged: {error}") from None
    for name, pictures in tensors.items():
        kind, _, rest = name.partition("/")
        attack, _, role = rest.rpartition("/")
        if kind != "reconstruction" or role not in get_args(Role):
            raise FedveilError(f"{folder / 'images.safetensors'} is damaged: it holds {name!r:.60}, as no result does")
        images.reconstructions[(attack, role)] = pictures  # type: ignore[index]
    return result, images
