"""The sentences of a verdict, in words that need no training, and what must be said beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from fedveil.auditing.judgment import Judgment, Terms
from fedveil.auditing.result import TOGETHER, Cost, Estimate, Question, Row, Warned
from fedveil.auditing.scoring import estimate
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.table import rounded_up
from fedveil.leakage.intervals import Interval, bootstrap
from fedveil.leakage.membership import AUC, CHANCE, RATES, others_needed
from fedveil.leakage.modality import Words
from fedveil.ledger.statement import Statement
from fedveil.tasks.measures import Measure, measure

FEW_EXAMPLES = 30  # below this intervals are rough
FEW_ROUNDS = 5  # below this most models have hardly begun to learn
STILL_LEARNING = 0.02  # a gain of accuracy in the last round that says that training was not over


# ---- what leaks ------------------------------------------------------------------------------------------------


def asked(question: Question, words: Words) -> str:
    """A question as the reader reads it."""
    return {
        "reconstruct": f"Can {words.rebuilt} be rebuilt from an update?",
        "link": f"Can an update be linked to a known {words.one}?",
        "member": "Can it be told whether a record was used?",
    }[question]


def found(rows: Sequence[Row], judged: Judgment, terms: Terms) -> str:
    """What the strongest attacker gets, beside those who got something else.

    rows: that ask the same question, of the same round.
    """
    lead, measure = judged.lead, judged.measure
    told = {"reconstruct": _picks, "link": _links, "member": _tells}[judged.question](judged, terms)
    start = f"At the start of round {lead.round}, " if lead.round is not None else ""
    if lead.role == "ceiling":
        return _begin(f"{start}without a defense, an attacker {told}.")
    informed = next((row for row in rows if row.role == "adaptive" and row.attack == lead.attack), None)
    sentence = f"{start}{_who(lead, informed, judged, terms)} {told}."
    if lead.role == "naive" and informed is not None and not terms.uninformed:
        sentence += f" One who knows it: {percent(informed.metrics[measure].mean)}."
    if judged.ceiling is not None:
        sentence += f" Undefended: {share(judged.ceiling.metrics[measure])}."
    return _begin(sentence)


def _who(lead: Row, informed: Row | None, judged: Judgment, terms: Terms) -> str:
    if lead.role == "adaptive" and not terms.uninformed:
        return "an attacker who knows the defense"
    if judged.ceiling is None and informed is None:
        return "an attacker who takes the updates as they are"  # whether there is a defense may not be known
    return "an attacker who does not know the defense"


def _picks(judged: Judgment, terms: Terms) -> str:
    of = "updates" if terms.settings.batch_size == 1 else terms.modality.words.many
    chance = percent(1 / terms.candidates)
    told = f"{terms.modality.picks(terms.candidates)} for {share(judged.lead.metrics[judged.measure])} of the {of}"
    told += f" (chance {chance}){_won(judged)}"
    seen = recognizable_share(judged.lead, terms)
    if seen is not None:
        what = terms.modality.words.rebuilt.replace("a ", "a recognizable ", 1)
        told += f", and gets {what} for {percent(seen.mean)}"
    return told


def _links(judged: Judgment, terms: Terms) -> str:
    one = terms.modality.words.one if terms.settings.batch_size == 1 else "batch"
    return (
        f"links {share(judged.lead.metrics[judged.measure])} of the updates to the right {one} out of "
        f"{terms.candidates} by comparing updates (chance {percent(1 / terms.candidates)}){_won(judged)}"
    )


def _tells(judged: Judgment, terms: Terms) -> str:
    lead = judged.lead
    found, where = lead.metrics[judged.measure], "the trained model" if lead.of_model else "an update"
    if judged.measure == AUC:
        pairs = f"in {share(found)} of the pairs (chance {percent(CHANCE[AUC])})"
        return f"tells members from others by {where} {pairs}, with {lead.attack}"
    rate = RATES[judged.measure]
    return (
        f"finds {share(found)} of the members by {where} at {percent(rate)} false alarms (chance {percent(rate)}), "
        f"with {lead.attack}"
    )


def wins(judged: Judgment) -> Counter[str]:
    """How often each of several attacks won, of what was picked at all."""
    picked = judged.lead.values[judged.measure]
    return Counter(name for name, value in zip(judged.lead.winners, picked, strict=False) if value)


def _won(judged: Judgment) -> str:
    """Which of several attacks it was."""
    counted = wins(judged)
    if not counted:
        return ""
    (name, most), total = counted.most_common(1)[0], counted.total()
    return f", each time with {name}" if most == total else f", most often with {name} ({most} of {total})"


def recognizable_share(row: Row, terms: Terms) -> Estimate | None:
    """The share of a row's reconstructions that a person would recognize; None where that was not measured."""
    if row.question != "reconstruct":
        return None
    seen = terms.modality.recognizable(row.values, terms.settings.recognizable_from)
    if seen is None:
        return None
    return estimate(bootstrap(seen, groups=[place // terms.settings.batch_size for place in range(len(seen))]))


def notes(judged: Sequence[Judgment], worst: Judgment, terms: Terms) -> list[str]:
    """What the words of the sentences mean, and how far they reach."""
    told = []
    for each in judged:
        if each.question == "link":
            told.append(_on_linking(each, terms))
            continue
        if each.question == "member":
            told.append(_on_telling(each))
            continue
        if recognizable_share(each.lead, terms) is not None:
            told.append(terms.modality.recognizable_note(terms.settings.recognizable_from))
        if each.measure in terms.modality.measure_notes:
            told.append(terms.modality.measure_notes[each.measure])
    count, counted = worst.lead.metrics[worst.measure].count, terms.counted(worst.question)
    if count < FEW_EXAMPLES:
        many = f"only {count} {counted}" if count > 1 else f"a single {counted.removesuffix('s')}"
        told.append(f"This rests on {many}: the numbers can change much with more.")
    if worst.lead.attack == TOGETHER:
        told.append("Of several attacks, for each update the one that got most counts; a guess may try as often.")
    return told


def _on_linking(judged: Judgment, terms: Terms) -> str:
    one = terms.modality.words.one if terms.settings.batch_size == 1 else "batch"
    told = (
        f"To link an update, the attacker compares it with the updates that {terms.candidates} known candidates would "
        f"have caused, one of which is the right {one}. Nothing is rebuilt."
    )
    if judged.lead.exact is False and judged.lead.role == "adaptive":  # the others do not ask how likely it is
        told += " How likely each candidate is under the defense has no closed form here: a better test may link more."
    return told


def _on_telling(judged: Judgment) -> str:
    others = judged.lead.curve.others if judged.lead.curve else 0
    used = "in the training of the model" if judged.lead.of_model else "in one update"
    told = (
        f"A member is an example that was used {used}; others are {others:,} held-out examples of the same kind. A "
        "pair is one of each, and the attacker names the member."
    )
    missing = [(name, rate) for name, rate in RATES.items() if name not in judged.lead.metrics]
    if missing:
        rates = " and ".join(f"at {percent(rate)} false alarms ({others_needed(name):,})" for name, rate in missing)
        told += f" Too few others to say which share of the members is found {rates}."
    return told


# ---- what it costs ---------------------------------------------------------------------------------------------


def cost(found: Cost) -> str:
    """The second sentence."""
    if found.rounds == 0 or found.undefended is None:
        return "Cost: not measured, as no model was trained."
    rounds, kind = f"after {found.rounds} round{'s' if found.rounds > 1 else ''}", measure(found.metric)
    direction = " (lower is better)" if kind.lower_is_better else ""
    bare = f"{kind.shown(found.undefended.mean)}"
    if found.defended is None or found.difference is None:
        return f"Test {found.metric}{direction} without a defense {rounds}: {bare}{_others(found, 'undefended')}."
    change = found.difference
    ends = f"[{kind.change(change.low).removesuffix(' points')}, {kind.change(change.high).removesuffix(' points')}]"
    return (
        f"Cost: test {found.metric}{direction} {bare} → {kind.shown(found.defended.mean)} {rounds} "
        f"({kind.change(change.mean)} {ends}){_others(found)}{_time(found)}."
    ).replace("-", "−")


def _others(found: Cost, only: Literal["undefended"] | None = None) -> str:
    """Other measures of the same model, in a few words."""
    told = ""
    for name, values in found.others.items():
        kind, order = measure(name), [only] if only else ["undefended", "defended"]
        told += f"; {name} " + " → ".join(kind.shown(values[which]) for which in order if which in values)
    return told


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


def warnings(found: Cost, judged: Sequence[Judgment], worst: Judgment, terms: Terms) -> list[Warned]:
    """Where a number says nothing, where a cost is large, and where numbers contradict each other."""
    told = _on_accuracy(found, terms.settings)
    if found.rounds and found.slowdown and found.slowdown_interval is None:
        told.append(Warned(words="Too few rounds were timed to say whether the difference in time is more than noise."))
    if terms.uninformed:
        words = (
            f"No attacker who knows the defense was tried: {' and '.join(terms.uninformed)} does not say what one "
            "would do. This counts against the defense."
        )
        told.append(Warned(words=words, loud=True))
    elif terms.settings.attackers == "naive" and worst.lead.role == "naive":
        told.append(Warned(words="No attacker who knows the defense was tried (attackers: naive).", loud=True))
    return told + [_on_bound(each) for each in judged if _broken(each)]


def _broken(judged: Judgment) -> bool:
    """Whether more was measured than a formal guarantee allows."""
    bound = judged.lead.allowed(judged.measure)
    return bound is not None and judged.lead.metrics[judged.measure].low > bound


def _on_bound(judged: Judgment) -> Warned:
    found, allowed = share(judged.lead.metrics[judged.measure]), rounded_up(judged.lead.allowed(judged.measure) or 0.0)
    what = "updates were linked" if judged.question == "link" else "members were told from others"
    words = (
        f"More {what}, {found}, than the formal guarantee allows any attacker, {allowed} %. So the "
        "guarantee does not hold as stated: do not rely on it."
    )
    return Warned(words=words, loud=True)


def _on_accuracy(found: Cost, settings: AuditSettings) -> list[Warned]:
    if found.rounds == 0 or found.undefended is None:
        return []
    told = _on_learning(found, found.undefended)
    rising = _last_gain(found)
    if large_drop(found, settings.large_drop):
        words = f"Large cost: {found.metric} falls by more than {100 * settings.large_drop:g} points."
        if measure(found.metric).lower_is_better:
            words = f"Large cost: {found.metric} rises by more than {_of_errors(settings.large_drop, found)}."
        told.append(Warned(words=words, loud=True))
    if found.rounds < FEW_ROUNDS:
        many = f"{found.rounds} round{'s' if found.rounds > 1 else ''}"
        words = f"Only {many} of training, fewer than {FEW_ROUNDS}: the cost after a whole training may differ."
        told.append(Warned(words=words))
    elif measure(found.metric).gain(rising) > STILL_LEARNING * _unit(found):
        words = (
            f"The model without a defense was still learning ({measure(found.metric).change(rising)} in the last "
            "round): the cost after more rounds may differ."
        )
        told.append(Warned(words=words))
    return told


def _on_learning(found: Cost, bare: Estimate) -> list[Warned]:
    """Whether the accuracy is no better than an answer that needs no model."""
    kind = measure(found.metric)
    ours, blind = found.defended, max(found.chance or 0.0, found.majority or 0.0)
    stuck, bare_stuck = ours is not None and _no_better(ours, blind, kind), _no_better(bare, blind, kind)
    if not blind or not (stuck or bare_stuck):
        return []
    guess = f"is no better than what {kind.without_model} would give ({kind.shown(blind)})"
    if not bare_stuck:
        return [Warned(words=f"Under the defense the model has not learned: {found.metric} {guess}.", loud=True)]
    which = "neither with the defense nor without" if stuck else "not even without a defense"
    words = (
        f"The model has not learned, {which}: {found.metric} {guess}. So it says nothing about the cost of the "
        "defense; train longer or otherwise."
    )
    return [Warned(words=words, loud=True)]


def large_drop(found: Cost, most: float) -> bool:
    """Whether the utility surely gets worse by more than this: as a fraction, or as a share of a whole for errors.

    For squared errors that is the targets' variance, so that it is by how much R² falls.
    """
    drop, kind = found.difference, measure(found.metric)
    if drop is None:
        return False
    return drop.low > most * _unit(found) if kind.lower_is_better else drop.high < -most


def _unit(found: Cost) -> float:
    """What differences of utility are measured in: 1, or of errors that of always answering the mean, or the whole."""
    kind = measure(found.metric)
    if kind.of_losses:
        return math.inf if found.undefended is None else found.undefended.mean
    return (found.majority or math.inf) if kind.lower_is_better else 1.0


def _of_errors(part: float, found: Cost) -> str:
    whole = "that without a defense" if measure(found.metric).of_losses else "the variance of the targets"
    return f"{100 * part:g} % of {whole}"


def _no_better(found: Estimate, blind: float, kind: Measure) -> bool:
    return found.high >= blind if kind.lower_is_better else found.low <= blind


def _last_gain(found: Cost) -> float:
    measured = [each.undefended for each in found.history if each.undefended is not None]
    return measured[-1] - measured[-2] if len(measured) > 1 else 0.0


def thresholds(found: Cost, terms: Terms, asked_of: Collection[Question] = ()) -> list[str]:
    """What the words were decided by, as set for this audit."""
    settings = terms.settings
    told = [
        f"exposed: the lower end of the interval is above {percent(settings.exposed_above)}",
        "no leakage found: no better than a guess without the update"
        + (f" by {percent(settings.smallest_gain)}" if settings.smallest_gain else "")
        + f", and a leak of {percent(settings.rule_out)} of the {terms.modality.words.many} is ruled out",
    ]
    if "member" in asked_of:
        told.append("membership: the same shares of what is above chance")
    errors = measure(found.metric).lower_is_better
    large = _of_errors(settings.large_drop, found) if errors else f"{100 * settings.large_drop:g} points"
    return told + ([f"large cost: more than {large}"] if found.rounds else [])


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


def at_most(bound: float | None, among: int, views: int = 1) -> str:
    """What a formal guarantee means for picking the right image, as a sentence to add to it.

    views: messages about each batch, over which the bound is composed.
    """
    if bound is None or math.isnan(bound):
        return ""
    shown = rounded_up(bound)
    if shown >= 100:
        return f" It leaves open that an attacker always picks the right one of {among}."
    seen = "one update" if views == 1 else f"{views} messages about one batch"
    return f" From {seen} no attacker at all can pick the right one of {among} more often than {shown} % of the time."


def counted_once(promised: Statement, views: int) -> Statement:
    """A statement that says, where attackers saw more, that one message about each batch is what it counts."""
    if views == 1 or not promised.formal:
        return promised
    told = (
        f" This ε counts one message about each batch, and does not hold for the {views} that the attackers here saw."
    )
    return replace(promised, sentence=promised.sentence + told, paragraph=promised.paragraph + told)


def _begin(text: str) -> str:
    return text[:1].upper() + text[1:]
