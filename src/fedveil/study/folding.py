"""From the audits of one defense at several seeds to one point, and from points to the front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import TOGETHER, Estimate, Question, Result, Row, Status, measures
from fedveil.auditing.roles import FLOORS, ROLES, Role
from fedveil.fields import field_values
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.modalities import modality
from fedveil.study.comparison import QUESTIONS, Leak, Point
from fedveil.study.seeds import over_seeds, pooled
from fedveil.study.strengths import Setting
from fedveil.tasks.measures import Measure, measure

PICTURES = 4  # reconstructions behind each point
SEVERITY: tuple[Status, ...] = ("no leakage found by these attacks", "not judged", "partly exposed", "exposed")


def point_of(setting: Setting | None, audits: Sequence[AuditResult]) -> Point:
    """One point from the audits of all seeds; without a setting, that of no defense."""
    results = [each.result for each in audits]
    first = results[0]
    costs = [each.cost for each in results]
    utilities = [cost.undefended if setting is None else cost.defended for cost in costs]
    losses = [] if setting is None else [cost.difference for cost in costs if cost.difference is not None]
    share = measure(first.cost.metric).share
    known = [each for each in utilities if each is not None]
    roles: list[Role] = ["ceiling"] if setting is None else ["naive", "adaptive", "ceiling"]
    slow = [cost.slowdown for cost in costs if cost.slowdown is not None]
    return Point(
        family="" if setting is None else setting.family,
        defense="none" if setting is None else str(setting.chain),
        settings={} if setting is None else {each.name: _plain(field_values(each)) for each in setting.chain.defenses},
        moved="" if setting is None else setting.label,
        utility=pooled(known, share=share),
        loss=pooled(losses) if losses else None,
        slowdown=float(np.median(slow)) if slow else None,
        leaks={question: leaks_of(results, question, roles) for question in QUESTIONS},
        metrics={role: _metrics(results, role) for role in (*roles, *FLOORS, "bound") if _rows(results, role)},
        statuses={question: _status(results, question) for question in QUESTIONS if first.verdict.answer(question)},
        guarantee=first.defense.guarantee,
        formal=first.defense.formal,
        informed=not first.defense.uninformed,
        pictures=_told(_lead(first)),
    )


def floors_of(audits: Sequence[AuditResult]) -> dict[Question, Leak]:
    """What is got without the update: by each question, the better of the floors."""
    results = [each.result for each in audits]
    found = {}
    for question in QUESTIONS:
        leaks = list(leaks_of(results, question, FLOORS).values())
        if leaks:
            found[question] = max(leaks, key=lambda leak: leak.found.mean)
    return found


def pictures_of(audit: AuditResult) -> NDArray[np.float32] | None:
    """The first reconstructions of the strongest attacker; None where there are no pictures."""
    lead = _lead(audit.result)
    if lead is None or audit.result.modality != "pictures":
        return None
    found = audit.images.reconstructions.get((lead.attack, lead.role))
    return None if found is None else found[:PICTURES]


def with_front(points: Sequence[Point], undefended: Point, utility: Measure) -> tuple[list[Point], Point]:
    """The points with the questions marked for which none is better: as useful and leaks less, or the reverse."""
    everyone = [*points, undefended]
    fronts: list[list[Question]] = [[] for _ in everyone]
    for question in QUESTIONS:
        leaks = [each.leaked(question) for each in everyone]
        placed = [
            (place, utility.gain(each.utility.mean), leak.found.mean)
            for place, (each, leak) in enumerate(zip(everyone, leaks, strict=True))
            if leak is not None
        ]
        for place, useful, leaked in placed:
            better = (u >= useful and k <= leaked and (u > useful or k < leaked) for _, u, k in placed)
            if not any(better):
                fronts[place].append(question)
    marked = [each.model_copy(update={"front": front}) for each, front in zip(everyone, fronts, strict=True)]
    return marked[:-1], marked[-1]


def leaks_of(results: Sequence[Result], question: Question, roles: Iterable[Role]) -> dict[Role, Leak]:
    """What each role gets by the measure that decides about a question, over all seeds."""
    found = {}
    for role in roles:
        rows = _rows(results, role, question)
        if not rows:
            continue
        names = [n for n in measures(question, modality(results[0].modality)) if all(n in row.metrics for row in rows)]
        leaks = [Leak(measure=name, found=_estimate(results, rows, name), attack=rows[0].attack) for name in names]
        if leaks:
            found[role] = max(leaks, key=lambda leak: leak.found.mean)
    return found


def _metrics(results: Sequence[Result], role: Role) -> dict[str, Estimate]:
    rows = _rows(results, role)
    names = [name for name in rows[0].metrics if name in METRICS and all(name in row.metrics for row in rows)]
    return {name: _estimate(results, rows, name) for name in names}


def _rows(results: Sequence[Result], role: Role, question: Question = "reconstruct") -> list[Row]:
    """The row of a role in every result, of all attacks together; empty where any result has none."""
    found = [each.row(role, TOGETHER, question=question) or each.row(role, question=question) for each in results]
    return [row for row in found if row is not None] if all(found) else []


def _estimate(results: Sequence[Result], rows: Sequence[Row], name: str) -> Estimate:
    if rows[0].question == "member":  # not a mean of values
        return pooled([row.metrics[name] for row in rows], share=True)
    per_update = 1 if rows[0].question == "link" else results[0].attacks[0].batch_size if results[0].attacks else 1
    runs = [(row.metrics[name], row.values.get(name, [])) for row in rows]
    return over_seeds(runs, share=METRICS[name].yes_or_no, per_update=per_update)


def _status(results: Sequence[Result], question: Question) -> Status:
    """The worst of all seeds."""
    answers = [each.verdict.answer(question) for each in results]
    return max((each.status for each in answers if each is not None), key=SEVERITY.index)


def _lead(result: Result) -> Row | None:
    """Whose reconstructions are shown."""
    rows = [row for row in result.rows if row.question == "reconstruct" and row.strongest]
    return rows[0] if rows else None


def _told(row: Row | None) -> str:
    return "" if row is None else f"{row.attack}, {ROLES[row.role].label}"


def _plain(settings: dict[str, object]) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
