"""What a comparison says to someone who must choose: sentences made from its numbers alone."""

from __future__ import annotations

from fedveil.auditing.result import Question
from fedveil.leakage.catalog import METRICS
from fedveil.study.comparison import Comparison, Leak, Point

AFFORDABLE = (0.01, 0.05)  # losses of utility that sentences are about, as a share
WHAT: dict[Question, str] = {
    "reconstruct": "What is rebuilt",
    "link": "Linking",
    "member": "Telling members",
}


def advice(comparison: Comparison) -> list[str]:
    """For each question, the setting that leaks least at a small cost, or that none protects."""
    found = []
    for question in comparison.questions:
        ceiling, floor = comparison.undefended.leaked(question), comparison.floors.get(question)
        if ceiling is None:
            continue
        beside = f"without a defense {_told(ceiling)}" + (f", by a guess {_told(floor)}" if floor else "")
        if floor is not None and ceiling.found.low <= floor.found.high:
            found.append(
                f"{WHAT[question]}: the attacks hardly beat a guess even without a defense ({beside}), so this says "
                "nothing about any defense here."
            )
            continue
        told: Point | None = None
        for loss in AFFORDABLE:
            best = best_within(comparison, question, loss)
            if best is None or best is not told:  # a larger cost that buys nothing needs no sentence
                found.append(_within(comparison, question, loss, ceiling, beside))
            told = best
    return list(dict.fromkeys(each for each in found if each))


def best_within(comparison: Comparison, question: Question, loss: float) -> Point | None:
    """Of the points that cost no more than this share of utility, the one that leaks least."""
    gain = comparison.measured.gain
    bare = comparison.undefended.utility.mean
    limit = loss if comparison.measured.share else loss * abs(bare)
    able = [
        (leak.found.mean, -gain(point.utility.mean), place, point)
        for place, point in enumerate(comparison.points)
        if (leak := point.leaked(question)) is not None and gain(point.utility.mean) >= gain(bare) - limit
    ]
    return min(able)[3] if able else None


def _within(comparison: Comparison, question: Question, loss: float, ceiling: Leak, beside: str) -> str:
    best = best_within(comparison, question, loss)
    cost = f"{100 * loss:g} points" if comparison.measured.share else f"{100 * loss:g} %"
    cost = cost.replace("1 points", "1 point")
    if best is None:
        return f"{WHAT[question]}: every setting costs more than {cost} of {comparison.utility}."
    leak = best.leaked(question)
    assert leak is not None
    if leak.found.high >= ceiling.found.low:
        return (
            f"{WHAT[question]}: within {cost} of {comparison.utility}, nothing that was compared surely protects. "
            f"{best.defense} leaks least: {_told(leak)} ({beside})."
        )
    change = "" if best.loss is None else f", {comparison.utility} {comparison.measured.change(best.loss.mean)}"
    return (
        f"{WHAT[question]}: within {cost} of {comparison.utility}, {best.defense} leaks least: {_told(leak)}{change} "
        f"({beside})."
    )


def _told(leak: Leak) -> str:
    metric = METRICS[leak.measure]
    factor, digits = (100, 0) if metric.share else (1, 2)
    return (
        f"{metric.format(leak.found.mean)} [{factor * leak.found.low:.{digits}f}–{factor * leak.found.high:.{digits}f}]"
    )
