"""Can membership be told? The answer of those who tell members from others, by the same thresholds as for the rest.

Thresholds are shares of what lies above chance: an AUC of 0.75 is halfway between a guess and certainty, so it counts
as a share of 50 % does elsewhere. Several attacks and measures are each looked at alone, with intervals widened for as
many looks as there are: whoever may try often also errs more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import ndtri

from fedveil.auditing.judgment import Judgment, Reason, Terms
from fedveil.auditing.result import Estimate, Row, Status
from fedveil.auditing.roles import ATTACKERS
from fedveil.auditing.sentences import percent, share
from fedveil.leakage.membership import CHANCE

MOST_MEMBERS = 100_000  # an attack that needs more of them to show anything is said not to work


def judge_members(rows: Sequence[Row], terms: Terms, more: Sequence[Status]) -> Judgment | None:
    """The judgment that shows most, over all attacks and measures; None where nothing was measured.

    rows: of one round, or of the model, or of all rounds together.
    more: statuses, from those that show least to those that show most.
    """
    own = [row for row in rows if row.question == "member"]
    attacks = list(dict.fromkeys(row.attack for row in own))
    looks = sum(len({name for row in own if row.attack == attack for name in row.metrics}) for attack in attacks)
    found = []
    for attack in attacks:
        alike = {row.role: row for row in own if row.attack == attack}
        leads = [row for role, row in alike.items() if role in ATTACKERS] or [alike["ceiling"]]
        for measure in CHANCE:
            there = [row for row in leads if measure in row.metrics]
            if there:
                lead = max(there, key=lambda row: row.metrics[measure].mean)
                found.append(_judged(lead, alike.get("ceiling"), alike["noise-floor"], measure, looks, terms))
    return max(found, key=lambda each: (more.index(each.status), _above(each.mean, each.measure)), default=None)


def _judged(lead: Row, ceiling: Row | None, floor: Row, measure: str, looks: int, terms: Terms) -> Judgment:
    settings, counted = terms.settings, terms.counted("member")
    count = lead.metrics[measure].count

    def judgment(status: Status, why: str, reason: Reason = "", needed: int = 0) -> Judgment:
        return Judgment("member", lead, ceiling, floor, measure, status, why, reason, needed)

    guess = _guess(floor.metrics[measure], measure)
    chance = f"a guess ({percent(guess)})"
    least = guess + settings.smallest_gain * (1 - guess)
    if ceiling is not None:
        top = widened(ceiling.metrics[measure], looks)
        if top.low <= least:
            told = f"even without a defense, {share(ceiling.metrics[measure])}, {{}} no better than {chance}"
            needed = _needed(ceiling.metrics[measure], least, looks)
            if top.mean > least and needed <= MOST_MEMBERS and _above(top.high, measure) >= settings.rule_out:
                why = f"Too few {counted}: with {count} of them {told.format('the test is')}."
                return judgment("not judged", why, "few examples", max(needed, count + 1))
            why = f"This test does not work here: {told.format('it is')}. So it says nothing about the defense."
            return judgment("not judged", why, "weak attack")
    here = widened(lead.metrics[measure], looks)
    threshold = CHANCE[measure] + settings.exposed_above * (1 - CHANCE[measure])
    if here.low > threshold:
        why = (
            f"Even the lower end of the interval, {percent(here.low)}, is above the threshold of {percent(threshold)}."
        )
        return judgment("exposed", why)
    if here.low > least:
        return judgment(
            "partly exposed",
            f"That is more than {chance}; but the lower end of the interval, {percent(here.low)}, is not above the "
            f"threshold of {percent(threshold)}.",
        )
    if here.high - least >= settings.rule_out * (1 - guess):
        return judgment(
            "not judged",
            f"Too few {counted}: with {count} of them the attacker cannot be told from {chance}, but neither can a "
            f"leak of {percent(settings.rule_out)} above chance be ruled out.",
            "few examples",
            max(_to_rule_out(here, settings.rule_out * (1 - guess), count), count + 1),
        )
    nothing = f"The strongest of these attackers does no better than {chance}, {share(lead.metrics[measure])}."
    if ceiling is None:
        unknown = "But whether the test works without a defense was not seen."
        return judgment("not judged", f"{nothing} {unknown}", "no ceiling")
    if lead.role == "ceiling" or (not terms.uninformed and settings.attackers != "naive"):
        return judgment("no leakage found by these attacks", f"{nothing} A better attack may find more.")
    return judgment("not judged", f"{nothing} But no attacker who knows the defense was tried.", "uninformed")


def _above(value: float, measure: str) -> float:
    """A value as a share of what lies above chance."""
    return (value - CHANCE[measure]) / (1 - CHANCE[measure])


def _guess(floor: Estimate, measure: str) -> float:
    """What is got without having seen anything: chance. Only where even noise tells members from others, as where they
    were gathered differently, the upper end of that."""
    return floor.high if floor.low > CHANCE[measure] else CHANCE[measure]


def widened(found: Estimate, looks: int) -> Estimate:
    """The interval for one of several looks: at 95 % all of them together hold what they say (Bonferroni)."""
    factor = float(ndtri(1 - 0.025 / max(looks, 1)) / ndtri(0.975))
    low, high = (found.mean + factor * (end - found.mean) for end in (found.low, found.high))
    return found.model_copy(update={"low": max(0.0, low), "high": min(1.0, high)})


def _needed(found: Estimate, least: float, looks: int) -> int:
    """About how many members would show that a value is above another: intervals shrink with the root of the count."""
    width, room = found.mean - widened(found, looks).low, found.mean - least
    return MOST_MEMBERS + 1 if room <= 0 else math.ceil(found.count * (1.4 * width / room) ** 2)


def _to_rule_out(found: Estimate, most: float, count: int) -> int:
    """About how many members would bring the upper end of an interval below what is to be ruled out."""
    return math.ceil(count * (1.4 * (found.high - found.mean) / most) ** 2)
