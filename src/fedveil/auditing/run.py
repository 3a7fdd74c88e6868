"""`audit`: train under a defense, attack what was shared, show what leaked and what it cost.

The stages: train → observe → fit → attack in every role → score → judge. Each but the last is kept in a store.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedveil.attacks.base import Attack
from fedveil.auditing.attackers import threats_of
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.cost import measure_cost
from fedveil.auditing.defense_card import defense_card
from fedveil.auditing.evidence import Evidence, gather
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.forecast import both, stages_of
from fedveil.auditing.judgment import Terms
from fedveil.auditing.membership import bounds_of, member_rows
from fedveil.auditing.observing import observe, reached
from fedveil.auditing.provenance import provenance
from fedveil.auditing.result import Result, Verdict
from fedveil.auditing.scoring import images_of, marked, rows_of
from fedveil.auditing.sentences import at_most, counted_once
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.auditing.threat_model import (
    Attempted,
    Situation,
    assumptions,
    attacked_words,
    in_rounds,
    not_given,
    not_tried,
    protocol_words,
)
from fedveil.auditing.training import Trained, train_both
from fedveil.auditing.verdict import judge
from fedveil.auditing.workshop import Workshop
from fedveil.clients.engine import Backend
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.federation.exposure import ledger_of
from fedveil.federation.observers import Watch
from fedveil.federation.perturbation import perturbation
from fedveil.federation.progress import watch_with
from fedveil.federation.settings import FederationSettings
from fedveil.ledger.picking import most_picked
from fedveil.ledger.statement import Statement
from fedveil.progress import Meter, style_for
from fedveil.tasks.task import Task, client_labels
from fedveil.workers import Workers, opened


def audit(
    task: Task | Experiment,
    defense: Defense | Chain | Sequence[Defense] | str | None = None,
    attack: Attack | str | Sequence[Attack | str] | None = None,
    *,
    suite: str | None = None,
    auxiliary: Any = None,
    federation: FederationSettings | None = None,
    settings: AuditSettings | None = None,
    seed: int = 0,
    backend: Backend = "auto",
    device: str = "cpu",
    train: bool = True,
    store: Store | Path | str | None = None,
    watch: Watch | None = None,
    command: str = "",
    workers: int | Workers = 1,
    progress: bool | None = None,
) -> AuditResult:
    """Train a task under a defense, attack what clients share, and judge what leaked and what it cost.

    task: or a whole `Experiment`, which says all that the arguments up to `train` say.
    attack: one attack or several, by name, with fields if wanted ("dlg:steps=9"), or as instances.
    suite: in place of these, "quick", "standard" (which runs where nothing is named) or "thorough".
    auxiliary: what attackers may learn from: "held-out" test examples (every second one), "none", a data set's name, or
        examples of your own, (images, labels) or a torch `Dataset`. What the task holds itself is left out of it.
    federation: how it is trained; also without training (`train=False`) its protocol, batch and rate decide what an
        update is.
    settings: which updates are attacked and how they are judged.
    store: a folder where the stages keep what they come to. An audit that was stopped goes on from there; another one
        with the same store computes nothing again that this one did. It holds victims' data: only you may enter it.
    workers: so many processes, or those of a pool, train FedAvg's clients and attack.
    progress: show stages and the time left; by default on a terminal and in a notebook only, and not beside a `watch`.
    """
    if isinstance(task, Experiment):
        experiment = task
    else:
        chosen = settings or AuditSettings()
        named = isinstance(auxiliary, str)
        experiment = Experiment(
            task=task,
            defense=defense if isinstance(defense, list | tuple) else (defense,),
            attack=attack if attack is None or isinstance(attack, list | tuple) else (attack,),
            suite=suite,
            own_auxiliary=None if named else auxiliary,
            federation=federation or FederationSettings(),
            audit=dataclasses.replace(chosen, auxiliary=auxiliary) if named else chosen,
            seed=seed,
            backend=backend,
            device=device,
            trains=train,
        )
    with ExitStack() as stack:
        pool = stack.enter_context(opened(workers))
        if watch is None or progress:
            watch = both(watch, watch_with(stack.enter_context(Meter(style_for(progress)))))
        shop = Workshop.open(experiment, Store.of(store), pool, watch)
        return run_audit(shop, command or "fedveil.audit(...) with the configuration below")


def run_audit(shop: Workshop, command: str) -> AuditResult:
    """All stages of an audit whose experiment was checked."""
    started, begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.perf_counter()
    config = shop.experiment.described() | {"task": shop.task.description}
    if shop.watch.plan:
        shop.watch.plan(stages_of(shop))
    if 1 in shop.experiment.audit.rounds:
        observe(shop, 1, None)  # what is wrong with a victim's data shows before anything is trained
    bare, defended = train_both(shop)
    shop, missed = reached(shop, defended or bare)
    evidence = gather(shop, bare, defended)

    shop.tell("judging")
    cost = measure_cost(shop.task, bare.run if bare else None, defended.run if defended else None)
    promised = promise(shop, defended)
    among = evidence.among
    views = shop.experiment.audit.views
    most = most_picked(promised, shop.exposures[0], among, views)
    threats = threats_of(evidence.attacks, shop.auxiliary, among)
    told = [each for each in evidence.scores if each.question == "member"]
    others = [each for each in evidence.scores if each.question != "member"]
    rows = rows_of(others, evidence.truths, shop.modality, bound=most, threats=threats, views=views)
    allowed = bounds_of(promised, shop.exposures[0], views)
    rows += marked(
        member_rows(told, evidence.truths.rounds, bounds=allowed, threats=threats, views=views), shop.modality
    )
    terms = Terms(shop.experiment.audit, shop.modality, among, config, tuple(shop.chain.without_knowledge))
    verdict = judge(rows, cost, promised.sentence + at_most(most, among, views), terms)
    document = describe(shop, evidence, verdict, promised)
    images = images_of(evidence.scores, evidence.truths, shop.modality)
    document |= {"text": shop.modality.pieces([images.originals, *images.reconstructions.values()])}
    result = Result(
        **document,
        rows=rows,
        cost=cost,
        provenance=provenance(
            command=command,
            config=config,
            seed=shop.experiment.seed,
            hashes={"data": shop.task.data_hash, "model": shop.task.model_hash},
            started=started,
            seconds=time.perf_counter() - begun,
        ),
    )
    if missed:
        result = result.model_copy(update={"not_tried": missed + result.not_tried})
    return AuditResult(result, images)


def promise(shop: Workshop, defended: Trained | None) -> Statement:
    """What the defense promises over what really happened; without training, over the attacked updates."""
    if defended is None or not shop.chain.defenses:
        found = shop.planned
    else:
        found = ledger_of(shop.task, shop.experiment.federation, shop.chain, defended.run.history).statement()
    return counted_once(found, shop.experiment.audit.views)


def describe(shop: Workshop, evidence: Evidence, verdict: Verdict, promised: Statement) -> dict[str, Any]:
    """The parts of a result that say what was attacked, how, and under what."""
    task, federation, truths = shop.task, shop.experiment.federation, evidence.truths
    auxiliary = shop.auxiliary if evidence.auxiliary_used else None
    situation, some = _situation(shop), evidence.observed[0]
    attempted = Attempted.of(evidence.attacks, evidence.among, auxiliary, evidence.left_out)
    moved = (
        perturbation([(truths.originals.flatten(0, 1), truths.seen.flatten(0, 1))], shop.task.normalization)
        if shop.task.text is None
        else None  # numbers of tokens have no distance
    )
    return {
        "data": task.name,
        "model": task.model_name,
        "protocol": protocol_words(
            federation.protocol, len(task.clients), federation.batch_size, federation.local_epochs
        ),
        "attacked": _attacked(shop),
        "modality": shop.modality.name,
        "table": shop.modality.legend(),
        "label_names": list(task.label_names),
        "holdings": client_labels(task),
        "defense": defense_card(shop.chain, promised, some.undefended.gradient, some.defended.gradient, moved),
        "verdict": verdict,
        "suite": shop.experiment.suite or "",
        "auxiliary": None if auxiliary is None else auxiliary.document(),
        "candidates": evidence.among,
        "judges": shop.judges,
        "attacks": evidence.runs,
        "assumptions": assumptions(situation, attempted),
        "not_given": not_given(task.model, attempted),
        "not_tried": not_tried(situation, attempted),
    }


def _attacked(shop: Workshop) -> str:
    """What was attacked: "16 updates of one image each, at the untrained model"."""
    settings, federation = shop.experiment.audit, shop.experiment.federation
    epochs = federation.local_epochs if federation.protocol == "fedavg" else 1
    updates = attacked_words(settings.victims, settings.batch_size, shop.modality.words, epochs)
    if settings.views > 1 and shop.chain.defenses:
        updates += f", {settings.views} messages about each"
    # A model built by name starts from random weights; the user's own may have been trained before.
    return f"{updates}, {in_rounds(settings.rounds, untrained='split' in shop.task.description)}"


def _situation(shop: Workshop) -> Situation:
    settings, federation = shop.experiment.audit, shop.experiment.federation
    local = federation.protocol == "fedavg"
    return Situation(
        model=shop.task.model,
        chain=shop.chain,
        updates=settings.victims,
        examples=settings.batch_size,
        rounds=settings.rounds,
        attackers=settings.attackers,
        local_steps=settings.local_steps if local else None,
        step_order=settings.step_order if local and settings.batch_size > federation.batch_size else None,
        trained_in=None if local else federation.batch_size,
        views=settings.views,
        columns=0 if shop.task.columns is None else len(shop.task.columns),
        vocabulary=0 if shop.task.text is None else shop.task.text.entries,
        modality=shop.modality.name,
    )
