"""From what attacks found to the rows of a table.

Each role of each attack is scored alone (`score_finding`) and can be kept alone; what needs several of them, floors and
worst cases, is worked out when the rows are made (`rows_of`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedveil.attacks.finding import Finding, Links, Membership, Reconstruction
from fedveil.attacks.threat import ThreatModel
from fedveil.auditing.attackers import threat_of_row
from fedveil.auditing.result import TOGETHER, AttackRun, CostCurve, Estimate, Images, Question, Row, gets, measures
from fedveil.auditing.roles import ATTACKERS, FLOORS, Role
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.intervals import Interval, bootstrap
from fedveil.leakage.modality import LINKED, Modality
from fedveil.leakage.truths import Truths
from fedveil.tasks.arrays import are_labels

REVISION = 1  # raised when the same findings get other scores, beside `Modality.revision`
NUMBER_FOUND = 0.05  # of the spread of all: numbers to predict that are off by less count as found
_FACTS = ("attack", "role", "question", "steps", "seconds", "of_model")


class Batches(Protocol):
    """Which update every example belongs to: all that is asked of the truth once everything is scored."""

    @property
    def rounds(self) -> tuple[int, ...]:
        """The round of every update."""

    @property
    def groups(self) -> list[int]:
        """The update of every example."""


# ---- one role alone ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RoleScore:
    """What one role of one attack got, per example or per victim, whatever others got."""

    attack: str
    role: Role
    question: Question
    values: dict[str, Tensor]  # metric -> (V·B,), or (V,) where updates are linked
    exhibit: Tensor | None = None  # (V·B, ...): what a report shows, in the order of the originals
    exact: Tensor | None = None  # (V,) of a link test
    labels: Tensor | None = None  # (V,): the share of each batch's labels that were found
    costs: Tensor | None = None  # (V, len(steps))
    on_the_way: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # metric -> share of the steps -> (V·B,)
    steps: tuple[int, ...] = ()
    seconds: float = 0.0
    scores: Tensor | None = None  # (V, N) of the examples in question, where members are told from others
    kinds: Tensor | None = None  # (V, N): which of them are members, see `leakage.membership`
    of_model: bool = False  # whether these are about the trained model, and not about updates

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, to be kept beside `facts`."""
        found = {f"values/{name}": value for name, value in self.values.items()}
        found |= {
            f"on_the_way/{name}/{mark}": v for name, marks in self.on_the_way.items() for mark, v in marks.items()
        }
        single = {name: getattr(self, name) for name in ("exhibit", "exact", "labels", "costs", "scores", "kinds")}
        return found | {name: tensor for name, tensor in single.items() if tensor is not None}

    def facts(self) -> str:
        """The rest, as JSON."""
        return json.dumps({name: getattr(self, name) for name in _FACTS})

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], facts: str) -> RoleScore:
        """What `tensors` and `facts` gave."""
        told = json.loads(facts)
        given: dict[str, Any] = {"values": {}, "on_the_way": {}, **told, "steps": tuple(told["steps"])}
        for key, tensor in tensors.items():
            kind, *rest = key.split("/", 2)
            if kind == "values":
                given["values"][rest[0]] = tensor
            elif kind == "on_the_way":
                given["on_the_way"].setdefault(rest[0], {})[rest[1]] = tensor
            else:
                given[kind] = tensor
        return cls(**given)

    @classmethod
    def concat(cls, parts: Sequence[RoleScore]) -> RoleScore:
        """The same role in several rounds as one, round after round."""
        listed = [part.tensors() for part in parts]
        tensors = {name: torch.cat([each[name] for each in listed]) for name in listed[0]}
        facts = json.loads(parts[0].facts()) | {"seconds": sum(part.seconds for part in parts)}
        return cls.read(tensors, json.dumps(facts))


def score_finding(attack: str, role: Role, finding: Finding, truths: Truths, modality: Modality) -> RoleScore:
    """Score what one role of an attack found."""
    if isinstance(finding, Links):
        if truths.place is None:
            raise ValueError("a link test is scored by where the originals stand among the candidates")
        linked = {LINKED: finding.linked(truths.place)}
        return RoleScore(attack, role, "link", linked, exact=finding.exact, seconds=finding.seconds)
    if isinstance(finding, Membership):
        raise ValueError("who was a member is not among the truths of updates: see `membership.member_score`")
    scores = modality.score(finding.inputs, truths, finding.iterates)
    return RoleScore(
        attack,
        role,
        "reconstruct",
        _with_cost(scores.values, finding),
        exhibit=scores.exhibit,
        labels=_found_labels(finding.labels, truths.labels) if _counted(truths.labels) else None,
        costs=finding.costs if finding.steps else None,
        on_the_way=scores.on_the_way,
        steps=tuple(finding.steps),
        seconds=finding.seconds,
    )


def score_unknown(attack: str, role: Role, finding: Finding, modality: Modality) -> RoleScore:
    """What can be told of a reconstruction without the truth: what it looks like, and how well it fits the update."""
    if not isinstance(finding, Reconstruction):
        raise ValueError("who links updates or tells members has candidates, so the truth is known")
    flat = finding.inputs.flatten(0, 1)
    return RoleScore(
        attack,
        role,
        "reconstruct",
        _with_cost({"diverged": ~torch.isfinite(flat).flatten(1).all(1).cpu()}, finding),
        exhibit=modality.exhibit(flat),
        costs=finding.costs if finding.steps else None,
        steps=tuple(finding.steps),
        seconds=finding.seconds,
    )


def score_given(role: Role, inputs: Tensor, truths: Truths, modality: Modality) -> RoleScore:
    """Score inputs that no attack made: the mean input, or what a perfect inversion of the gradient would see."""
    scores = modality.score(inputs.expand_as(truths.originals), truths)
    return RoleScore("", role, "reconstruct", scores.values, exhibit=scores.exhibit)


def _with_cost(values: dict[str, Tensor], finding: Reconstruction) -> dict[str, Tensor]:
    """The values with the matching cost of every example's batch. One that is not finite is a diverged attack."""
    if not finding.steps and bool(finding.cost.isnan().all()):
        return values  # the attack matches nothing
    size = len(values["diverged"]) // max(len(finding.cost), 1)
    cost = finding.cost.detach().to("cpu", torch.float32).double().repeat_interleave(size)
    return {**values, "attack_loss": cost, "diverged": values["diverged"] | ~torch.isfinite(cost)}


def _counted(labels: Tensor) -> bool:
    """Whether labels can be found apart from inputs: the targets of running text are its own tokens."""
    return labels.is_floating_point() or labels.dim() == 2


def _found_labels(found: Tensor, true: Tensor) -> Tensor:
    """The share of each batch's labels that were found, repeats counted; order within a batch says nothing.

    Of several labels per example, the share of all zeros and ones, in the order that fits best; of numbers, those that
    are off by less than `NUMBER_FOUND` of the spread of all of them.
    """
    if true.is_floating_point():
        return torch.tensor([_nearest(*pair) for pair in zip(*_close(found, true), strict=True)], dtype=torch.float64)
    shares = []
    for one, other in zip(found.cpu(), true.cpu(), strict=True):
        classes = int(max(one.max(), other.max())) + 1
        both = torch.minimum(torch.bincount(one, minlength=classes), torch.bincount(other, minlength=classes))
        shares.append(float(both.sum()) / len(other))
    return torch.tensor(shares, dtype=torch.float64)


def _close(found: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Targets (V, B, entries) in units in which those that differ by less than 1 are taken as equal."""
    flat = [each.cpu().double().reshape(*true.shape[:2], -1) for each in (found, true)]
    if bool(((true == 0) | (true == 1)).all()) and true.dim() > 2:
        return flat[0] / 0.5, flat[1] / 0.5
    spread = flat[1].flatten(0, 1).std(0, correction=0)
    unit = NUMBER_FOUND * torch.where(spread > 0, spread, flat[1].abs().amax((0, 1)).clamp_min(1e-12))
    return flat[0] / unit, flat[1] / unit


def _nearest(found: Tensor, true: Tensor) -> float:
    """The share of entries that agree, examples (B, entries) assigned to each other by how many do."""
    agree = ((found[:, None] - true[None]).abs() < 1).double().mean(2)
    rows, columns = linear_sum_assignment(-agree.numpy())
    return float(agree[rows, columns].mean())


# ---- all of them together ------------------------------------------------------------------------------------


def rows_of(
    scores: Sequence[RoleScore],
    truths: Truths,
    modality: Modality,
    *,
    bound: float | None = None,
    threats: Mapping[str, ThreatModel] | None = None,
    views: int = 1,
) -> list[Row]:
    """The rows of a table: each role over all rounds, the worst case over several attacks, then round by round.

    bound: how often any attacker at all may pick the right candidate of a defended update, see `ledger.picking`.
    threats: what each attack has, by its name, see `attackers`.
    views: messages about each batch that attackers of defended updates saw.
    """
    related = _related(scores, modality)
    rows = []
    for score, values in zip(scores, related, strict=True):
        exact = None if score.exact is None else bool(score.exact.all())
        allowed = bound if score.question == "link" and score.role in ATTACKERS else None
        row = make_row(score.attack, score.role, values, _groups(score.question, truths), question=score.question)
        threat = threat_of_row(score.attack, score.role, threats, views) if threats is not None else None
        rows.append(row.model_copy(update={"exact": exact, "bound": allowed, "threat": threat}))
    rows = marked([*rows, *worst_case(rows, truths, modality)], modality)
    return rows + rows_by_round(rows, truths)


def _related(scores: Sequence[RoleScore], modality: Modality) -> list[dict[str, Tensor]]:
    """The values of every score with what needs the floors: of its own attack, and of no attack."""
    found = []
    for score in scores:
        if score.question != "reconstruct":
            found.append(score.values)
            continue
        alike: dict[str, dict[str, Tensor]] = {
            each.role: each.values
            for each in scores
            if each.question == score.question and each.attack in (score.attack, "")
        }
        found.append(modality.relate(alike, FLOORS)[score.role])
    return found


def make_row(
    attack: str, role: Role, values: Mapping[str, Tensor], groups: list[int], *, question: Question = "reconstruct"
) -> Row:
    """A row from one value per example and metric; `diverged` is left out where nothing did."""
    values = {name: _finite(name, value) for name, value in values.items()}
    values = {name: v for name, v in values.items() if len(v) and (name != "diverged" or bool(v.any()))}
    metrics = {
        name: estimate(bootstrap(value.numpy(), groups=groups, share=METRICS[name].yes_or_no))
        for name, value in values.items()
    }
    listed = {name: [float(v) for v in value] for name, value in values.items()}
    return Row(attack=attack, role=role, question=question, metrics=metrics, values=listed)


def _finite(name: str, value: Tensor) -> Tensor:
    """A cost that is not finite counts as the largest that is; without any there is nothing to tell."""
    finite = torch.isfinite(value)
    if name != "attack_loss" or bool(finite.all()):
        return value
    return torch.where(finite, value, value[finite].max()) if bool(finite.any()) else value[:0]


def worst_case(rows: Sequence[Row], truths: Truths, modality: Modality) -> list[Row]:
    """Where several attacks ask one question: for every role and example, what the attack gets that gets most.

    The floor is treated alike: whoever may try 20 attacks and keep the best also has 20 chances to guess. Every metric
    is taken by itself; the winner is the attack that picks the right one and, of several, comes nearest.
    """
    found = []
    for question in dict.fromkeys(row.question for row in rows):
        tried = [row for row in rows if row.question == question and row.attack]
        if len({row.attack for row in tried}) < 2:
            continue
        for role in dict.fromkeys(row.role for row in tried):
            alike = [row for row in tried if row.role == role]
            names = [name for name in alike[0].values if all(name in row.values for row in alike)]
            most = {name: _most(name, [row.values[name] for row in alike]) for name in names}
            made = make_row(TOGETHER, role, most, _groups(question, truths), question=question)
            threats = [row.threat for row in alike if row.threat is not None]
            update = {
                "bound": alike[0].bound,
                "exact": None if question != "link" else all(row.exact for row in alike),
                "threat": ThreatModel.union(threats) if threats else None,
                "winners": _winners(alike, modality),
            }
            found.append(made.model_copy(update=update))
    return found


def _winners(rows: Sequence[Row], modality: Modality) -> list[str]:
    """For every example the attack that gets most; of equals the first."""
    shares, near = measures(rows[0].question, modality), modality.nearness

    def got(row: Row, place: int) -> tuple[float, float]:
        picked = max((row.values[name][place] for name in shares if name in row.values), default=0.0)
        value = row.values[near][place] if near in row.values else math.nan
        leaked = value if METRICS[near].private == "low" else -value
        return picked, -math.inf if math.isnan(leaked) else leaked

    def winner(place: int) -> str:
        return max(rows, key=lambda row: got(row, place)).attack

    return [winner(place) for place in range(min(map(len, rows[0].values.values()), default=0))]


def _most(name: str, listed: Sequence[Sequence[float]]) -> Tensor:
    values = torch.tensor(listed, dtype=torch.float64)
    return values.amax(0) if METRICS[name].private == "low" else values.amin(0)


def marked(rows: list[Row], modality: Modality) -> list[Row]:
    """The rows with the strongest attacker marked: of defended updates, or, if there is none, of undefended ones."""
    found = [strongest(rows, question, modality) for question in dict.fromkeys(row.question for row in rows)]
    return [row.model_copy(update={"strongest": any(row is lead for lead in found)}) for row in rows]


def strongest(rows: Sequence[Row], question: Question, modality: Modality) -> Row | None:
    """The attacker, with one attack, who gets most of the defended updates; of the undefended if none is defended."""
    asked = [row for row in rows if row.question == question and row.round is None and row.attack != TOGETHER]
    attacked = [row for row in asked if row.role in ATTACKERS] or [row for row in asked if row.role == "ceiling"]
    return max(attacked, key=lambda row: gets(row, modality), default=None)


def rows_by_round(rows: Sequence[Row], truths: Truths) -> list[Row]:
    """The rows again for each attacked round alone, where several were attacked: they may leak very differently."""
    numbers = list(dict.fromkeys(truths.rounds))
    found = []
    for number in numbers if len(numbers) > 1 else []:
        for row in rows:
            groups = _groups(row.question, truths)
            mine = torch.tensor([truths.rounds[victim] == number for victim in groups])
            values = {name: torch.tensor(listed, dtype=torch.float64)[mine] for name, listed in row.values.items()}
            chosen = [group for group in groups if truths.rounds[group] == number]
            made = make_row(row.attack, row.role, values, chosen, question=row.question)
            update = {name: getattr(row, name) for name in ("bound", "exact", "threat")}
            winners = [winner for winner, own in zip(row.winners, mine.tolist(), strict=False) if own]
            found.append(made.model_copy(update={**update, "round": number, "winners": winners}))
    return found


def _groups(question: Question, truths: Truths) -> list[int]:
    """The victim behind every value."""
    return truths.groups if question == "reconstruct" else list(range(len(truths.rounds)))


# ---- what else a result says of them ---------------------------------------------------------------------------


def attack_run(
    scores: Sequence[RoleScore],
    truths: Batches,
    settings: dict[str, Any],
    *,
    labels_known: bool = True,
    steps: int | None = None,
    restarts: int | None = None,
) -> AttackRun:
    """How one attack went, from the scores of all its roles.

    steps, restarts: of an attack that has them.
    """
    first = next((score for score in scores if score.role == "ceiling"), scores[0])
    read = None if labels_known or first.labels is None else estimate(bootstrap(first.labels.numpy()))
    return AttackRun(
        attack=first.attack,
        question=first.question,
        settings=settings,
        seconds=sum(score.seconds for score in scores),
        restarts=restarts,
        steps=steps,
        victims=len(truths.rounds),
        batch_size=len(truths.groups) // len(truths.rounds),
        label_recovery=read,
        curves=[_curve(score, score.costs) for score in scores if score.costs is not None],
        on_the_way={score.role: _marks(score, truths) for score in scores if score.on_the_way},
    )


def _curve(score: RoleScore, noted: Tensor) -> CostCurve:
    # Rounding can take a cost of zero below it, where a logarithmic axis cannot follow.
    costs = noted.detach().cpu().float().double().clamp_min(1e-8).numpy()
    low, median, high = np.nanquantile(np.where(np.isfinite(costs), costs, np.nan), [0.25, 0.5, 0.75], axis=0).tolist()
    return CostCurve(attack=score.attack, role=score.role, steps=list(score.steps), median=median, low=low, high=high)


def _marks(score: RoleScore, truths: Batches) -> dict[str, dict[str, Estimate]]:
    return {
        name: {mark: estimate(bootstrap(value.numpy(), groups=truths.groups)) for mark, value in marks.items()}
        for name, marks in score.on_the_way.items()
    }


def images_of(scores: Sequence[RoleScore], truths: Truths, modality: Modality) -> Images:
    """The originals and what every role made of them, as a report shows them."""
    made = Images(modality.exhibit(truths.originals.flatten(0, 1)).numpy(), shown_labels(truths.labels.flatten(0, 1)))
    for score in scores:
        if score.exhibit is not None:
            made.reconstructions[(score.attack, score.role)] = score.exhibit.numpy()
    return made


def shown_labels(labels: Tensor) -> NDArray[Any]:
    """Targets as a result keeps them: rows of zeros and ones are whole numbers."""
    return (labels.long() if are_labels(labels) else labels).cpu().numpy()


def estimate(interval: Interval) -> Estimate:
    """An interval as the result document keeps it."""
    return Estimate(mean=interval.mean, low=interval.low, high=interval.high, count=interval.count)
