"""The sentences of a verdict, in words that need no training, and what must be said beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedveil.auditing.finding import Finding
from fedveil.auditing.result import Cost, Estimate, Row, Warned
from fedveil.auditing.scoring import estimate
from fedveil.auditing.settings import AuditSettings
from fedveil.leakage.intervals import Interval, bootstrap

FEW_IMAGES = 30  # below this intervals are rough
FEW_ROUNDS = 5  # below this most models have hardly begun to learn
STILL_LEARNING = 0.02  # a gain of accuracy in the last round that says that training was not over


# ---- what leaks ------------------------------------------------------------------------------------------------


def leakage(
    rows: list[Row], worst: Finding, settings: AuditSettings, among: int, uninformed: Sequence[str]
) -> tuple[str, Estimate | None]:
    """The first sentence, and the share of recognizable pictures in it."""
    lead, measure = worst.lead, worst.measure
    recognizable = recognizable_share(lead, settings)
    of = "updates" if settings.batch_size == 1 else "images"
    found = f"picks the right image out of {among} for {share(lead.metrics[measure])} of the {of}"
    found += f" (chance {percent(1 / among)})"
    if recognizable is not None:
        found += f", and gets a recognizable picture for {percent(recognizable.mean)}"
    start = f"At the start of round {lead.round}, " if lead.round is not None else ""
    if lead.role == "ceiling":
        return _begin(f"{start}without a defense, an attacker {found}."), recognizable
    knows = lead.role == "adaptive" and not uninformed
    who = "an attacker who knows the defense" if knows else "an attacker who does not know the defense"
    told = f"{start}{who} {found}."
    other = next((row for row in rows if row.role == "adaptive" and row.attack == lead.attack), None)
    if lead.role == "naive" and other is not None and not uninformed:
        told += f" One who knows it: {percent(other.metrics[measure].mean)}."
    return _begin(f"{told} Undefended: {share(worst.ceiling.metrics[measure])}."), recognizable


def recognizable_share(row: Row, settings: AuditSettings) -> Estimate | None:
    """The share of a row's pictures that are nearest to the right image and like it enough; None without SSIM."""
    if "ssim" not in row.values or "identified" not in row.values:
        return None
    similar = np.asarray(row.values["ssim"]) >= settings.recognizable_ssim
    both = similar & (np.asarray(row.values["identified"]) >= 0.5)
    groups = [image // settings.batch_size for image in range(len(both))]
    return estimate(bootstrap(both, groups=groups))


def notes(worst: Finding, settings: AuditSettings, recognizable: bool) -> list[str]:
    """What the words of the first sentence mean, and how far they reach."""
    found = []
    if recognizable:
        found.append(
            "A picture counts as recognizable where it is nearer to the right image than to all the others, and its "
            "structural similarity to it (SSIM: 1 for the same picture, about 0 for unrelated ones) is at least "
            f"{settings.recognizable_ssim:g}."
        )
    if worst.measure == "identified_features":
        found.append("Images were compared by what a classifier sees in them: that found more than comparing pixels.")
    count = worst.lead.metrics[worst.measure].count
    if count < FEW_IMAGES:
        many = f"only {count} images" if count > 1 else "a single image"
        found.append(f"This rests on {many}: the numbers can change much with more.")
    return found


# ---- what it costs ---------------------------------------------------------------------------------------------


def cost(found: Cost) -> str:
    """The second sentence."""
    if found.rounds == 0 or found.undefended is None:
        return "Cost: not measured, as no model was trained."
    rounds = f"after {found.rounds} round{'s' if found.rounds > 1 else ''}"
    if found.defended is None or found.difference is None:
        return f"Test {found.metric} without a defense {rounds}: {100 * found.undefended.mean:.1f} %."
    change = found.difference
    return (
        f"Cost: test {found.metric} {100 * found.undefended.mean:.1f} % → {100 * found.defended.mean:.1f} % {rounds} "
        f"({100 * change.mean:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]){_time(found)}."
    ).replace("-", "−")


def _time(found: Cost) -> str:
    if not found.slowdown:
        return ""
    ratio = f"{found.slowdown:.2f} times as long"
    between = found.slowdown_interval
    if between is None:
        return f"; a round takes {ratio}"
    interval = f"[{between.low:.2f}–{between.high:.2f}]"
    if between.low <= 1 <= between.high:
        return f"; a round takes {ratio}, which is within noise {interval}"
    return f"; a round takes {ratio} {interval}"


def warnings(found: Cost, settings: AuditSettings, uninformed: Sequence[str], lead: Row) -> list[Warned]:
    """Where a number says nothing, and where a cost is large."""
    told = _on_accuracy(found, settings)
    if found.rounds and found.slowdown and found.slowdown_interval is None:
        told.append(Warned(words="Too few rounds were timed to say whether the difference in time is more than noise."))
    if uninformed:
        words = (
            f"No attacker who knows the defense was tried: {' and '.join(uninformed)} does not say what one would do. "
            "This counts against the defense."
        )
        told.append(Warned(words=words, loud=True))
    elif settings.attackers == "naive" and lead.role == "naive":
        told.append(Warned(words="No attacker who knows the defense was tried (attackers: naive).", loud=True))
    return told


def _on_accuracy(found: Cost, settings: AuditSettings) -> list[Warned]:
    if found.rounds == 0 or found.undefended is None:
        return []
    told = _on_learning(found, found.undefended)
    drop, rising = found.difference, _last_gain(found)
    if drop is not None and drop.high < -settings.large_drop:
        words = f"Large cost: {found.metric} falls by more than {100 * settings.large_drop:g} points."
        told.append(Warned(words=words, loud=True))
    if found.rounds < FEW_ROUNDS:
        many = f"{found.rounds} round{'s' if found.rounds > 1 else ''}"
        words = f"Only {many} of training, fewer than {FEW_ROUNDS}: the cost after a whole training may differ."
        told.append(Warned(words=words))
    elif rising > STILL_LEARNING:
        words = (
            f"The model without a defense was still learning ({100 * rising:+.1f} points in the last round): the cost "
            "after more rounds may differ."
        )
        told.append(Warned(words=words))
    return told


def _on_learning(found: Cost, bare: Estimate) -> list[Warned]:
    """Whether the accuracy is no better than an answer that needs no model."""
    ours, blind = found.defended, max(found.chance or 0.0, found.majority or 0.0)
    stuck = ours is not None and ours.low <= blind
    if not blind or not (stuck or bare.low <= blind):
        return []
    guess = f"is no better than what always naming the most frequent class would give ({100 * blind:.1f} %)"
    if bare.low > blind:
        return [Warned(words=f"Under the defense the model has not learned: {found.metric} {guess}.", loud=True)]
    which = "neither with the defense nor without" if stuck else "not even without a defense"
    words = (
        f"The model has not learned, {which}: {found.metric} {guess}. So it says nothing about the cost of the "
        "defense; train longer or otherwise."
    )
    return [Warned(words=words, loud=True)]


def _last_gain(found: Cost) -> float:
    measured = [each.undefended for each in found.history if each.undefended is not None]
    return measured[-1] - measured[-2] if len(measured) > 1 else 0.0


def thresholds(settings: AuditSettings, found: Cost) -> list[str]:
    """What the words were decided by, as set for this audit."""
    told = [
        f"exposed: the lower end of the interval is above {percent(settings.exposed_above)}",
        "no leakage found: no better than a guess without the update"
        + (f" by {percent(settings.smallest_gain)}" if settings.smallest_gain else "")
        + f", and a leak of {percent(settings.rule_out)} of the images is ruled out",
    ]
    return told + ([f"large cost: more than {100 * settings.large_drop:g} points"] if found.rounds else [])


# ---- numbers ---------------------------------------------------------------------------------------------------


def percent(value: float) -> str:
    """A share in percent; small ones keep a digit that says something."""
    scaled = 100 * value
    if 0 < scaled < 0.95:
        return f"{scaled:.1g} %"
    return f"{scaled:.0f} %"


def share(found: Estimate) -> str:
    """A share with its interval."""
    return f"{100 * found.mean:.0f} % [{100 * found.low:.0f}–{100 * found.high:.0f}]"


def points(interval: Interval) -> str:
    """A difference of shares with its interval."""
    ends = f"{100 * interval.mean:+.0f} points [{100 * interval.low:+.0f}, {100 * interval.high:+.0f}]"
    return ends.replace("-", "−")


def at_most(bound: float | None, among: int) -> str:
    """What a formal guarantee means for picking the right image, as a sentence to add to it."""
    if bound is None or math.isnan(bound):
        return ""
    shown = math.ceil(100 * bound) if bound < 0.99 else 100
    if shown >= 100:
        return f" It leaves open that an attacker always picks the right one of {among}."
    return (
        f" From one update no attacker at all can pick the right one of {among} more often than {shown} % of the time."
    )


def _begin(text: str) -> str:
    return text[:1].upper() + text[1:]
