"""The verdict: three sentences and a status word that follow from the rows by printed thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedveil.auditing import sentences
from fedveil.auditing.again import command_line
from fedveil.auditing.finding import Finding, Reason
from fedveil.auditing.power import about, changes, images_needed
from fedveil.auditing.result import MEASURES, Answer, Cost, Role, Row, Status, Verdict, recovers
from fedveil.auditing.sentences import percent, points, share
from fedveil.auditing.settings import AuditSettings
from fedveil.leakage.floors import better_floor
from fedveil.leakage.intervals import Interval, paired

DEFENDED: tuple[Role, ...] = ("naive", "adaptive")
FLOORS: tuple[Role, ...] = ("noise-floor", "mean-floor")
MOST_IMAGES = 1000  # an attack that needs more of them to show anything is said not to work

# Of two ways to look at the same updates the one that shows more counts: one that shows nothing refutes no other.
_MORE: tuple[Status, ...] = ("not judged", "no leakage found by these attacks", "partly exposed", "exposed")
# Of two rounds the worse counts: what is not known of one round is not made good by another.
_WORSE: tuple[Status, ...] = ("no leakage found by these attacks", "not judged", "partly exposed", "exposed")


def strongest(rows: list[Row]) -> Row | None:
    """The attacker who identifies most of the defended images (the undefended ones if there is no defense).

    Over all attacked rounds together, where the rows have that.
    """
    pooled = [row for row in rows if row.round is None] or rows
    attacked = [row for row in pooled if row.role in DEFENDED] or [row for row in pooled if row.role == "ceiling"]
    return max(attacked, key=recovers, default=None)


def judge(
    rows: list[Row],
    cost: Cost,
    guarantee: str,
    *,
    settings: AuditSettings,
    among: int,
    config: Mapping[str, Any] | None = None,
    uninformed: Sequence[str] = (),
) -> Verdict:
    """Judge the strongest attacker of the worst round against a guess without the update, and against no defense.

    rows: where some name their round, each round is judged by its own; else all together.
    config: of the audit, to name the command that would settle an open verdict.
    uninformed: defenses that do not say what an attacker who knows them would do: nothing is granted to them.
    """
    rounds: list[int | None] = [*sorted({row.round for row in rows if row.round is not None})] or [None]
    found = [_judge_round([row for row in rows if row.round == number], settings, uninformed) for number in rounds]
    worst = max(found, key=lambda each: (_WORSE.index(each.status), each.mean, recovers(each.lead)))
    next_step, changed = _next_step(worst, settings, config or {}, uninformed)
    leakage, recognizable = sentences.leakage(
        [row for row in rows if row.round == worst.lead.round], worst, settings, among, uninformed
    )
    return Verdict(
        status=worst.status,
        sentences=[leakage, sentences.cost(cost), guarantee],
        why=worst.why + _other_rounds(found, worst),
        floor=worst.floor.role,
        role=worst.lead.role,
        attack=worst.lead.attack,
        round=worst.lead.round,
        measure=worst.measure,
        recognizable=recognizable,
        answers=_answers(worst),
        warnings=sentences.warnings(cost, settings, uninformed, worst.lead),
        notes=sentences.notes(worst, settings, recognizable is not None),
        thresholds=sentences.thresholds(settings, cost),
        next_step=next_step,
        command=command_line(config, changed) if changed is not None and config else "",
    )


def _judge_round(rows: list[Row], settings: AuditSettings, uninformed: Sequence[str]) -> Finding:
    """The finding that shows most, over attacks and measures."""
    found = []
    for ceiling in (row for row in rows if row.role == "ceiling"):
        leads = [row for row in rows if row.attack == ceiling.attack and row.role in DEFENDED] or [ceiling]
        for measure in (name for name in MEASURES if name in ceiling.metrics):
            lead = max(leads, key=lambda row: (row.metrics[measure].mean, recovers(row)))
            floor = _better_floor(rows, ceiling.attack, measure)
            found.append(_judge_measure(lead, ceiling, floor, measure, settings, uninformed))
    if not found:
        raise ValueError("a verdict needs at least the undefended row")
    return max(found, key=lambda each: (_MORE.index(each.status), each.mean))


def _judge_measure(
    lead: Row, ceiling: Row, floor: Row, measure: str, settings: AuditSettings, uninformed: Sequence[str]
) -> Finding:
    groups = groups_of(lead, settings.batch_size)

    def finding(status: Status, why: str, reason: Reason = "", images: int = 0) -> Finding:
        return Finding(lead, ceiling, floor, measure, status, why, reason, images)

    guess = f"a guess without the update ({percent(floor.metrics[measure].mean)})"
    gain, top = settings.smallest_gain, _gain(ceiling, floor, measure, groups)
    count = len(groups)
    if top.low <= gain:
        needed = _to_show_the_attack(ceiling, floor, measure, groups, top, settings)
        if needed is not None:
            return finding(
                "not judged",
                f"Too few images: with {count} of them even the attack without a defense, "
                f"{share(ceiling.metrics[measure])}, cannot be told from {guess}.",
                "few images",
                max(needed, count + 1),
            )
        return finding(
            "not judged",
            f"This attack does not work here: even without a defense, {share(ceiling.metrics[measure])}, it is no "
            f"better than {guess}. So it says nothing about the defense.",
            "weak attack",
        )
    lowest = lead.metrics[measure].low
    if lowest > settings.exposed_above:
        return finding(
            "exposed",
            f"Even the lower end of the interval, {percent(lowest)}, is above the threshold of "
            f"{percent(settings.exposed_above)}.",
        )
    above = _gain(lead, floor, measure, groups)
    if above.low > gain:
        return finding(
            "partly exposed",
            f"That is more than {guess}, by {points(above)}; but the lower end of the interval, {percent(lowest)}, is "
            f"not above the threshold of {percent(settings.exposed_above)}.",
        )
    if above.high - gain >= settings.rule_out:
        gained, lost, worth = changes(lead, floor, measure, groups)
        needed = images_needed(
            gained, lost, lambda low, high: low > gain or high - gain < settings.rule_out, worth=worth
        )
        return finding(
            "not judged",
            f"Too few images: with {count} of them the attacker cannot be told from {guess}, but neither can a leak of "
            f"{percent(settings.rule_out)} of the images be ruled out (difference {points(above)}).",
            "few images",
            max(needed, count + 1),
        )
    nothing = f"The strongest of these attackers does no better than {guess}; the difference is {points(above)}."
    if lead.role == "ceiling" or (not uninformed and settings.attackers != "naive"):
        return finding("no leakage found by these attacks", f"{nothing} A better attack may find more.")
    return finding("not judged", f"{nothing} But no attacker who knows the defense was tried.", "uninformed")


def _to_show_the_attack(
    ceiling: Row, floor: Row, measure: str, groups: list[int], top: Interval, settings: AuditSettings
) -> int | None:
    """How many images would show that the undefended attack works; None where that is not to be expected."""
    gained, lost, worth = changes(ceiling, floor, measure, groups)
    if top.mean <= settings.smallest_gain:
        if top.high < settings.exposed_above:
            return None  # an attack that works would have been seen
        gained, lost = settings.exposed_above, 0.0
    needed = images_needed(gained, lost, lambda low, high: low > settings.smallest_gain, worth=worth)
    return needed if needed <= MOST_IMAGES else None


# ---- what to do next -----------------------------------------------------------------------------------------


def _next_step(
    worst: Finding, settings: AuditSettings, config: Mapping[str, Any], uninformed: Sequence[str]
) -> tuple[str, dict[str, Any] | None]:
    """What would settle an open verdict, in words and as changes of the configuration."""
    if worst.reason == "few images":
        updates = about(-(-worst.images // settings.batch_size))
        return f"Use about {updates} updates.", {"audit.victims": updates}
    if worst.reason == "weak attack":
        return _stronger_attack(worst.lead.attack, settings, config)
    if worst.reason == "uninformed" and not uninformed:
        return "Try the attacker who knows the defense, too.", {"audit.attackers": "both"}
    if worst.reason == "uninformed":
        return (
            f"Say in {' and '.join(uninformed)} what an attacker who knows it would do (`knowledge`, or "
            "`matched_as_it_is`), and audit again."
        ), {}
    return "", None


def _stronger_attack(name: str, settings: AuditSettings, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What to try when an attack fails without a defense too."""
    if settings.batch_size > 1:
        return "Attack updates of a single image first: they are the easiest.", {"audit.batch_size": 1}
    given = [dict(each) for each in config.get("attack", ()) if each.get("name") == name]
    if name == "inverting-gradients" and given and "steps" in given[0]:
        steps = 4 * int(given[0]["steps"])
        return (
            f"Try more steps and restarts ({steps:,} steps below), another attack, or a model that is easier to "
            "invert, such as `lenet` with its sigmoids."
        ), {"attack": [{**given[0], "steps": steps}]}
    return "Try the attack `inverting-gradients`, which works on more models.", {
        "attack": [{"name": "inverting-gradients"}]
    }


# ---- parts ---------------------------------------------------------------------------------------------------


def _answers(worst: Finding) -> list[Answer]:
    """Each question apart. Linking and membership are asked by no attack of these audits yet."""
    not_asked = "No attack of this audit asks that."
    return [
        Answer(question="Can a picture be rebuilt from an update?", status=worst.status, why=worst.why),
        Answer(question="Can an update be linked to a known record?", status="not judged", why=not_asked),
        Answer(question="Can it be told whether a record was used?", status="not judged", why=not_asked),
    ]


def _other_rounds(found: list[Finding], worst: Finding) -> str:
    others = [each for each in found if each is not worst]
    if not others:
        return ""
    told = "; ".join(f"round {each.lead.round}: {each.status} ({percent(each.mean)})" for each in others)
    return f" This is the worst of the attacked rounds; {told}."


def groups_of(row: Row, batch_size: int) -> list[int]:
    """The update of every image of a row: images of one batch depend on each other."""
    count = max(map(len, row.values.values()), default=0)
    return [image // batch_size for image in range(count)]


def _gain(row: Row, floor: Row, measure: str, groups: list[int]) -> Interval:
    """By how much a row identifies more than the floor, paired on the same images."""
    return paired(row.values[measure], floor.values[measure], groups=groups, share=True)


def _better_floor(rows: list[Row], attack: str, measure: str) -> Row:
    floors = {row.role: row for row in rows if row.role in FLOORS and row.attack in ("", attack)}
    means = {str(role): row.metrics[measure].mean for role, row in floors.items()}
    best = better_floor(measure, means)
    tied = {role: row for role, row in floors.items() if means[role] == means[best]}
    # Where both recognize equally many, the one that comes nearer to the images is the harder to beat.
    return max(tied.values(), key=lambda row: row.metrics["psnr"].mean)
