"""The verdict: each question judged apart, by printed thresholds; the worst answer is the headline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from fedveil.auditing import sentences
from fedveil.auditing.judgment import Judgment, Reason, Terms
from fedveil.auditing.member_judgment import judge_members
from fedveil.auditing.next_step import next_step
from fedveil.auditing.power import changes, examples_needed
from fedveil.auditing.result import TOGETHER, Answer, Cost, Question, Row, Status, Verdict, gets, measures
from fedveil.auditing.roles import ATTACKERS, FLOORS
from fedveil.auditing.sentences import percent, points, share
from fedveil.leakage.floors import better_floor
from fedveil.leakage.intervals import Interval, paired

MOST_EXAMPLES = 1000  # an attack that needs more of them to show anything is said not to work

# Of two ways to look at the same updates the one that shows more counts: one that shows nothing refutes no other.
_MORE: tuple[Status, ...] = ("not judged", "no leakage found by these attacks", "partly exposed", "exposed")
# Of two rounds the worse counts: what is not known of one round is not made good by another.
_WORSE: tuple[Status, ...] = ("no leakage found by these attacks", "not judged", "partly exposed", "exposed")
# Reasons why an attack says nothing at all, so that another question's answer stands alone.
_SILENT: tuple[Reason, ...] = ("weak attack", "no ceiling")


def judge(rows: Sequence[Row], cost: Cost, guarantee: str, terms: Terms) -> Verdict:
    """Judge each question by its strongest attacker, beside a guess without the update and beside no defense.

    rows: as `rows_of` makes them. Where some name their round, each round is judged by its own; else all together.
    guarantee: the sentence on what is formally promised.
    """
    found = [_judge_question(rows, question, terms) for question in get_args(Question)]
    judged = [(answer, judgment) for answer, judgment in found if judgment is not None]
    if not judged:
        raise ValueError("a verdict needs at least one attacked row")
    lead, worst = max(judged, key=lambda each: _rank(each[1]))  # of equals the first: what is rebuilt is worse
    told = [lead.sentence, *(answer.sentence for answer, _ in judged if answer is not lead)]
    return Verdict(
        status=lead.status,
        question=lead.question,
        sentences=[*told, *_linked_only([answer for answer, _ in judged], terms), sentences.cost(cost), guarantee],
        why=lead.why,
        answers=[answer for answer, _ in found],
        warnings=sentences.warnings(cost, [judgment for _, judgment in judged], worst, terms),
        notes=sentences.notes([judgment for _, judgment in judged], worst, terms),
        thresholds=sentences.thresholds(cost, terms, {judgment.question for _, judgment in judged}),
        next_step=lead.next_step,
        command=lead.command,
    )


def _rank(judged: Judgment) -> int:
    """How bad an answer is beside those to other questions. One that is open is worse than finding nothing."""
    if judged.status == "not judged" and judged.reason in _SILENT:
        return -1
    return _WORSE.index(judged.status)


def _linked_only(answers: list[Answer], terms: Terms) -> list[str]:
    """That updates can be linked, but that nothing was rebuilt from them, told as exactly that."""
    status = {answer.question: answer.status for answer in answers}
    rebuilt = status.get("reconstruct")
    if status.get("link") not in ("exposed", "partly exposed") or rebuilt in (None, "exposed", "partly exposed"):
        return []
    words = terms.modality.words
    start = f"So updates can be linked to the {words.many} behind them"
    if rebuilt == "not judged":
        return [f"{start}; whether {words.rebuilt} can be rebuilt from them is not judged."]
    return [f"{start}, although what these attacks rebuilt from them is no better than a guess without the update."]


# ---- one question --------------------------------------------------------------------------------------------


def settled(rows: Sequence[Row], question: Question, terms: Terms) -> bool:
    """Whether a question needs no further attack: in every attacked round the updates are exposed.

    More attacks could only get more, as for each example the one counts that gets most. That nothing was found, on the
    other hand, is never settled.
    """
    own = [row for row in rows if row.question == question]
    return bool(own) and all(each is not None and each.status == "exposed" for each in _rounds(own, question, terms))


def _rounds(rows: Sequence[Row], question: Question, terms: Terms) -> list[Judgment | None]:
    """Each attacked round judged by its own rows, where there are some; else all together."""
    numbers: list[int | None] = [*sorted({row.round for row in rows if row.round is not None})] or [None]
    if question == "member" and numbers != [None]:
        apart = [judge_members([row for row in rows if row.round == number], terms, _MORE) for number in numbers]
        return [*apart, judge_members([row for row in rows if row.of_model], terms, _MORE)]
    return [_judge_round([row for row in rows if row.round == number], question, terms) for number in numbers]


def _judge_question(rows: Sequence[Row], question: Question, terms: Terms) -> tuple[Answer, Judgment | None]:
    asked = sentences.asked(question, terms.modality.words)
    own = [row for row in rows if row.question == question]
    tried = [row.attack for row in own if row.attack]
    if not tried:
        why = "No attack of this audit asks that."
        return Answer(question=question, asked=asked, status="not judged", why=why), None
    judged = [each for each in _rounds(own, question, terms) if each is not None]
    if not judged:
        why = f"There were no other {terms.modality.words.many} to tell the right one from."
        return Answer(question=question, asked=asked, status="not judged", why=why), None
    worst = max(judged, key=lambda each: (_WORSE.index(each.status), each.mean, gets(each.lead, terms.modality)))
    words, command = next_step(worst, terms, tried)
    of_round = [row for row in own if row.round == worst.lead.round]
    answer = Answer(
        question=question,
        asked=asked,
        status=worst.status,
        why=worst.why + _other_rounds(judged, worst),
        sentence=sentences.found(of_round, worst, terms),
        role=worst.lead.role,
        attack=worst.lead.attack,
        winner=next((name for name, _ in sentences.wins(worst).most_common(1)), ""),
        round=worst.lead.round,
        measure=worst.measure,
        floor=worst.floor.role,
        found=worst.lead.metrics[worst.measure],
        undefended=None if worst.ceiling is None else worst.ceiling.metrics[worst.measure],
        guess=worst.floor.metrics[worst.measure],
        bound=worst.lead.allowed(worst.measure),
        recognizable=sentences.recognizable_share(worst.lead, terms),
        next_step=words,
        command=command,
    )
    return answer, worst


def _judge_round(rows: list[Row], question: Question, terms: Terms) -> Judgment | None:
    """The judgment that shows most, over all measures; None where none of them was measured.

    The worst case over several attacks stands beside the worst case of their floors: `worst_case` made both.
    """
    if question == "member":
        return judge_members(rows, terms, _MORE)
    names = {row.attack for row in rows if row.attack}
    if len(names) > 1 and TOGETHER not in names:
        raise ValueError("several attacks are judged by their worst case: add the rows of `worst_case`")
    name = TOGETHER if TOGETHER in names else next(iter(names), "")
    own = [row for row in rows if row.attack in (name, "")]
    ceiling = next((row for row in own if row.role == "ceiling"), None)
    leads = [row for row in own if row.role in ATTACKERS] or ([ceiling] if ceiling else [])
    found = []
    for measure in measures(question, terms.modality):
        there = [row for row in leads if measure in row.metrics]
        if there:
            lead = max(there, key=lambda row: (row.metrics[measure].mean, gets(row, terms.modality)))
            found.append(_judge_measure(lead, ceiling, _better_floor(own, measure, terms), measure, terms))
    return max(found, key=lambda each: (_MORE.index(each.status), each.mean), default=None)


def _judge_measure(lead: Row, ceiling: Row | None, floor: Row, measure: str, terms: Terms) -> Judgment:
    settings, counted = terms.settings, terms.counted(lead.question)
    groups = groups_of(lead, terms.per_update(lead.question))
    count = len(groups)

    def judgment(status: Status, why: str, reason: Reason = "", needed: int = 0) -> Judgment:
        return Judgment(lead.question, lead, ceiling, floor, measure, status, why, reason, needed)

    guess = f"a guess without the update ({percent(floor.metrics[measure].mean)})"
    if ceiling is not None:
        top = _gain(ceiling, floor, measure, groups)
        if top.low <= settings.smallest_gain:
            needed = _to_show_the_attack(ceiling, floor, measure, groups, top, terms)
            if needed is not None:
                return judgment(
                    "not judged",
                    f"Too few {counted}: with {count} of them even the attack without a defense, "
                    f"{share(ceiling.metrics[measure])}, cannot be told from {guess}.",
                    "few examples",
                    max(needed, count + 1),
                )
            several = lead.attack == TOGETHER
            start = "None of these attacks works here" if several else "This attack does not work here"
            undefended = f"even without a defense, {share(ceiling.metrics[measure])}"
            return judgment(
                "not judged",
                f"{start}: {undefended}, {'they are' if several else 'it is'} no better than {guess}. So "
                f"{'they say' if several else 'it says'} nothing about the defense.",
                "weak attack",
            )
    lowest = lead.metrics[measure].low
    if lowest > settings.exposed_above:
        return judgment(
            "exposed",
            f"Even the lower end of the interval, {percent(lowest)}, is above the threshold of "
            f"{percent(settings.exposed_above)}.",
        )
    above = _gain(lead, floor, measure, groups)
    if above.low > settings.smallest_gain:
        return judgment(
            "partly exposed",
            f"That is more than {guess}, by {points(above)}; but the lower end of the interval, {percent(lowest)}, is "
            f"not above the threshold of {percent(settings.exposed_above)}.",
        )
    if above.high - settings.smallest_gain >= settings.rule_out:
        return judgment(
            "not judged",
            f"Too few {counted}: with {count} of them the attacker cannot be told from {guess}, but neither can a leak "
            f"of {percent(settings.rule_out)} of the {counted} be ruled out (difference {points(above)}).",
            "few examples",
            max(_to_settle(lead, floor, measure, groups, terms), count + 1),
        )
    return judgment(*_nothing_found(lead, ceiling, guess, above, terms))


def _nothing_found(
    lead: Row, ceiling: Row | None, guess: str, above: Interval, terms: Terms
) -> tuple[Status, str, Reason]:
    """No more than a guess: whether that speaks for the defense."""
    nothing = f"The strongest of these attackers does no better than {guess}; the difference is {points(above)}."
    if ceiling is None:
        unknown = "But whether the attack works on undefended updates of this model was not seen."
        return "not judged", f"{nothing} {unknown}", "no ceiling"
    if lead.role == "ceiling" or (not terms.uninformed and terms.settings.attackers != "naive"):
        return "no leakage found by these attacks", f"{nothing} A better attack may find more.", ""
    return "not judged", f"{nothing} But no attacker who knows the defense was tried.", "uninformed"


# ---- numbers -------------------------------------------------------------------------------------------------


def _to_show_the_attack(
    ceiling: Row, floor: Row, measure: str, groups: list[int], top: Interval, terms: Terms
) -> int | None:
    """How many examples would show that the undefended attack works; None where that is not to be expected."""
    settings = terms.settings
    gained, lost, worth = changes(ceiling, floor, measure, groups)
    if top.mean <= settings.smallest_gain:
        if top.high < settings.exposed_above:
            return None  # an attack that works would have been seen
        gained, lost = settings.exposed_above, 0.0
    needed = examples_needed(gained, lost, lambda low, high: low > settings.smallest_gain, worth=worth)
    return needed if needed <= MOST_EXAMPLES else None


def _to_settle(lead: Row, floor: Row, measure: str, groups: list[int], terms: Terms) -> int:
    """How many examples would either show a leak or rule it out."""
    gain, ruled_out = terms.settings.smallest_gain, terms.settings.rule_out
    gained, lost, worth = changes(lead, floor, measure, groups)
    return examples_needed(gained, lost, lambda low, high: low > gain or high - gain < ruled_out, worth=worth)


def _other_rounds(found: list[Judgment], worst: Judgment) -> str:
    others = [each for each in found if each is not worst]
    if not others:
        return ""
    told = "; ".join(f"{_when(each)}: {each.status} ({percent(each.mean)})" for each in others)
    return f" This is the worst of the attacked rounds; {told}."


def _when(judged: Judgment) -> str:
    return "the trained model" if judged.lead.of_model else f"round {judged.lead.round}"


def groups_of(row: Row, per_update: int) -> list[int]:
    """The update behind every value of a row: examples of one batch depend on each other."""
    count = max(map(len, row.values.values()), default=0)
    return [place // per_update for place in range(count)]


def _gain(row: Row, floor: Row, measure: str, groups: list[int]) -> Interval:
    """By how much a row gets more than the floor, paired on the same examples."""
    return paired(row.values[measure], floor.values[measure], groups=groups, share=True)


def _better_floor(rows: list[Row], measure: str, terms: Terms) -> Row:
    floors = {row.role: row for row in rows if row.role in FLOORS and measure in row.metrics}
    means = {str(role): row.metrics[measure].mean for role, row in floors.items()}
    best = better_floor(measure, means)
    # Of two that pick out equally many, the one that comes nearer to the originals is the harder to beat.
    tied = [row for role, row in floors.items() if means[role] == means[best]]
    return max(tied, key=lambda row: gets(row, terms.modality))
