"""What a result says of captured updates: what was attacked, under what, and why nothing could be judged."""

from __future__ import annotations

import hashlib
from typing import Any, get_args

from fedveil.auditing import sentences
from fedveil.auditing.capture_shop import CaptureShop
from fedveil.auditing.defense_card import defense_card
from fedveil.auditing.judgment import Terms
from fedveil.auditing.result import Answer, Cost, DefenseCard, Question, Verdict
from fedveil.auditing.threat_model import (
    Attempted,
    Situation,
    assumptions,
    attacked_words,
    captured_in,
    message_words,
    not_given,
    not_tried,
)
from fedveil.defenses.guarantee import Exposure
from fedveil.fields import field_values
from fedveil.ledger.ledger import EVERYONE, Ledger, Release
from fedveil.ledger.statement import Statement
from fedveil.registry import attacks, defenses

NO_DEFENSE = "No defense is stated: the updates were attacked as they are."


def promise(shop: CaptureShop) -> tuple[Statement, Exposure]:
    """What the stated defense promises over the captured releases, and what the worst off client sent."""
    chain, first = shop.known.chain, shop.captures[0]
    weights = first.before.values()
    ledger = Ledger(
        Exposure(
            parameters=sum(weight.numel() for weight in weights),
            rounds=0,
            steps_per_round=1,
            sampling_rate=1.0,
            bare_buffers=any(buffer.is_floating_point() for buffer in (first.buffers or {}).values()),
            dtypes=tuple(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})),
            seeded=False,
        )
    )
    for capture in shop.captures:
        ledger.spend(capture.client, Release(chain, gradients=capture.steps))
    if chain.aggregates:
        ledger.spend(EVERYONE, Release(chain, 0, 0, means=len(shop.captures)))
    return ledger.statement(), ledger.exposures(chain)[0][0]


def unjudged(terms: Terms, guarantee: str, *, scored: bool) -> Verdict:
    """The verdict where something that a judgment needs was not given.

    scored: the truth is known, and only others to tell it from are missing.
    """
    many = terms.modality.words.many
    if scored:
        why = f"There were no other {many} to tell the right ones from."
        step = f"Give other {many} of the same kind (`data`)."
    else:
        why = f"It is not known which {many} were behind the updates."
        step = f"Give what was behind each update (`truth`) and other {many} of the same kind (`data`)."
    asked = {question: sentences.asked(question, terms.modality.words) for question in get_args(Question)}
    return Verdict(
        status="not judged",
        sentences=[f"What leaked cannot be judged: {why[0].lower()}{why[1:]}", sentences.cost(Cost()), guarantee],
        why=why,
        answers=[Answer(question=name, asked=words, status="not judged", why=why) for name, words in asked.items()],
        next_step=step,
    )


def described(shop: CaptureShop, promised: Statement, among: int) -> dict[str, Any]:
    """The parts of a result that say what was attacked, how, and under what."""
    known, settings, updates = shop.known, shop.case.settings, shop.updates
    attempted = Attempted.of(shop.attacks, among, shop.auxiliary, shop.skipped)
    situation = Situation(
        model=known.model,
        chain=known.chain,
        updates=settings.victims,
        examples=settings.batch_size,
        rounds=settings.rounds,
        attackers=settings.attackers,
        local_steps=settings.local_steps if updates.kind != "gradient" else None,
        step_order=settings.step_order if updates.steps > updates.local_epochs else None,
        captured=message_words(updates.kind, updates.steps),
        stated=known.stated,
    )
    whose = captured_in([(capture.round, capture.client) for capture in shop.captures])
    counted = attacked_words(settings.victims, settings.batch_size, shop.case.modality.words, updates.local_epochs)
    return {
        "data": shop.others.name if shop.others is not None else "unknown data",
        "model": known.model_name,
        "protocol": f"captured {message_words(updates.kind, updates.steps)}",
        "attacked": f"{counted}, {whose}",
        "label_names": list(shop.others.label_names) if shop.others is not None else [],
        "defense": _card(shop, promised),
        "auxiliary": None if attempted.auxiliary is None else attempted.auxiliary.document(),
        "candidates": among,
        "judges": shop.judges,
        "assumptions": assumptions(situation, attempted),
        "not_given": not_given(known.model, attempted),
        "not_tried": not_tried(situation, attempted),
    }


def _card(shop: CaptureShop, promised: Statement) -> DefenseCard:
    card = defense_card(shop.known.chain, promised)
    unknown = {"name": "none stated", "summary": NO_DEFENSE, "weaknesses": []}
    return card if shop.known.stated else card.model_copy(update=unknown)


def configuration(shop: CaptureShop) -> dict[str, Any]:
    """All that decides what comes out, as plain data."""
    known, case = shop.known, shop.case
    return {
        "seed": case.seed,
        "backend": case.bench.backend,
        "model": known.model_name,
        "data": None if shop.others is None else shop.others.name,
        "shape": list(known.shape),
        "classes": known.classes,
        "mean": list(known.normalization.mean),
        "std": list(known.normalization.std),
        "truth": shop.originals is not None,
        "audit": field_values(case.settings),
        "attack": [attacks.describe(each) for each in shop.attacks],
        "defense": [defenses.describe(each) for each in known.chain.defenses],
        "captures": [
            {"client": each.client, "round": each.round, "kind": each.kind, "sha256": each.content}
            for each in shop.captures
        ],
    }


def hashes(shop: CaptureShop) -> dict[str, str]:
    """Of what was attacked and what it was told from."""
    whole = hashlib.sha256(" ".join(each.content for each in shop.captures).encode()).hexdigest()
    return {"captures": whole} | ({"data": shop.others.data_hash} if shop.others is not None else {})
