"""What would settle an open question, in words and as changes of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedveil.auditing.again import command_line
from fedveil.auditing.judgment import Judgment, Terms
from fedveil.auditing.power import about

STRONGEST = "inverting-gradients"  # of the attacks that rebuild inputs, the one that works on most models
ALIGNMENT = "update-alignment"  # of the attacks that tell members from others, the one that works on most models
_STRONGER = {"quick": "standard", "standard": "thorough"}
Step = tuple[str, dict[str, Any] | None]


def next_step(judged: Judgment, terms: Terms, tried: Iterable[str]) -> tuple[str, str]:
    """What to do next and the command that does it; both empty where nothing is open or nothing is known to help.

    tried: the attacks that asked this question.
    """
    words, changed = _step(judged, terms, set(tried))
    return words, command_line(terms.config, changed) if changed is not None and terms.config else ""


def _step(judged: Judgment, terms: Terms, tried: set[str]) -> Step:
    if judged.question == "member" and judged.reason in ("few examples", "weak attack"):
        return _tell_better(judged, terms, tried)
    if judged.reason == "few examples":
        updates = about(-(-judged.needed // terms.per_update(judged.question)))
        return f"Use about {updates} updates.", {"audit.victims": updates}
    if judged.reason == "weak attack":
        return _stronger_attack(judged, terms, tried)
    if judged.reason == "uninformed" and not terms.uninformed:
        return "Try the attacker who knows the defense, too.", {"audit.attackers": "both"}
    if judged.reason == "uninformed":
        return (
            f"Say in {' and '.join(terms.uninformed)} what an attacker who knows it would do (`knowledge`, or "
            "`matched_as_it_is`), and audit again."
        ), {}
    if judged.reason == "no ceiling":
        return "Audit the same model without a defense: that shows whether the attack works on it.", None
    return "", None


def _tell_better(judged: Judgment, terms: Terms, tried: set[str]) -> Step:
    """What to do where a test of membership says nothing."""
    if judged.reason == "few examples" and judged.lead.of_model:
        many = about(judged.needed)
        return f"Ask about {many:,} members and as many others.", {"audit.nonmembers": many}
    if judged.reason == "few examples":
        updates = about(-(-judged.needed // terms.per_update("member")))
        return f"Use about {updates} updates.", {"audit.victims": updates}
    if not judged.lead.of_model and terms.settings.batch_size > 1:
        return f"Attack updates of a single {terms.modality.words.one} first: they are the easiest.", {
            "audit.batch_size": 1
        }
    if ALIGNMENT not in tried:
        listed = [dict(each) for each in terms.config.get("attack", ())]
        return f"Look at single updates, too, with `{ALIGNMENT}`.", {"attack": [*listed, {"name": ALIGNMENT}]}
    return "", None


def _stronger_attack(judged: Judgment, terms: Terms, tried: set[str]) -> Step:
    """What to try when an attack fails without a defense too."""
    if terms.settings.batch_size > 1:
        one = terms.modality.words.one
        return f"Attack updates of a single {one} first: they are the easiest.", {"audit.batch_size": 1}
    if judged.question != "reconstruct":
        return "", None
    stronger = _STRONGER.get(str(terms.config.get("suite")))
    if stronger:
        return f"Try the suite `{stronger}`, which has more attacks, steps and tries.", {"suite": stronger}
    if "suite" in terms.config:
        return "Try a model that is easier to invert, such as `lenet` with its sigmoids.", None
    listed = [dict(each) for each in terms.config.get("attack", ())]
    others = [each for each in listed if each.get("name") not in tried]  # which ask something else
    given = next((each for each in listed if each.get("name") == STRONGEST and "steps" in each), None)
    if given is None:
        return f"Try the attack `{STRONGEST}`, which works on more models.", {"attack": [{"name": STRONGEST}, *others]}
    steps = 4 * int(given["steps"])
    return (
        f"Try more steps and restarts ({steps:,} steps below), another attack, or a model that is easier to invert, "
        "such as `lenet` with its sigmoids."
    ), {"attack": [{**given, "steps": steps}, *others]}
