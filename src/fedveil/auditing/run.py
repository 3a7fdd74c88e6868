"""`audit`: train under a defense, attack what was shared, show what leaked and what it cost.

The stages: train -> observe -> fit -> attack in every role -> score -> judge. Each but the last is kept in a store.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.attacks.base import Attack
from fedveil.attacks.matching import GradientMatching
from fedveil.auditing.attacking import attacked, scene_of, scenes_by_role, scored, scored_given
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.cost import measure_cost
from fedveil.auditing.defense_card import defense_card
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.forecast import attack_line, both, round_of, stages_of
from fedveil.auditing.judgment import Terms
from fedveil.auditing.observing import HeldOut, Observed, Truth, observe, reached, truth_of
from fedveil.auditing.provenance import provenance
from fedveil.auditing.result import AttackRun, Cost, Result
from fedveil.auditing.scoring import RoleScore, attack_run, images_of, rows_of
from fedveil.auditing.sentences import at_most
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.auditing.threat_model import Attempted, assumptions, attacked_words, not_given, not_tried, protocol_words
from fedveil.auditing.training import Trained, train_both
from fedveil.auditing.verdict import judge
from fedveil.auditing.workshop import Workshop
from fedveil.clients.engine import Backend
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.exposure import exposures
from fedveil.federation.observers import Watch
from fedveil.federation.perturbation import perturbation
from fedveil.federation.progress import watch_with
from fedveil.federation.rehearsal import dry_step
from fedveil.federation.run import Run, engine_for, federate
from fedveil.federation.settings import Federation, FederationSettings
from fedveil.federation.steps import Plan
from fedveil.leakage.truths import Truths
from fedveil.ledger.picking import most_picked
from fedveil.progress import Meter, style_for
from fedveil.registry import attacks as attack_registry
from fedveil.tasks.client_labels import ClientLabels
from fedveil.tasks.task import Task, client_labels
from fedveil.workers import Workers, opened


def audit(
    task: Task | Experiment,
    defense: Defense | Chain | Sequence[Defense] | str | None = None,
    attack: Attack | str | Sequence[Attack | str] = "inverting-gradients",
    *,
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
    federation: how it is trained; also without training (`train=False`) its protocol, batch and rate decide what an
        update is.
    settings: which updates are attacked and how they are judged.
    store: a folder where the stages keep what they come to. An audit that was stopped goes on from there; another one
        with the same store computes nothing again that this one did. It holds victims' data, for your eyes only.
    workers: so many processes, or those of a pool, train FedAvg's clients and attack.
    progress: show stages and the time left; by default on a terminal and in a notebook only, and not beside a `watch`.
    """
    experiment = task if isinstance(task, Experiment) else Experiment(
        task=task,
        defense=defense,
        attack=attack,
        federation=federation or FederationSettings(),
        audit=settings or AuditSettings(),
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
    if shop.watch.plan:
        shop.watch.plan(stages_of(shop.experiment))
    config = shop.experiment.described()  # as it was asked for
    if 1 in shop.experiment.audit.rounds:
        observe(shop, 1, None)  # what is wrong with a victim's data shows before anything is trained
    bare, defended = train_both(shop)
    shop, missed = reached(shop, defended or bare)
    evidence = gather(shop, defended or bare)
    shop.tell("judging")
    cost = measure_cost(shop.task, bare.run if bare else None, defended.run if defended else None)
    result = judged(shop, evidence, cost, config, _history(defended))
    about = provenance(
        command=command,
        config=config,
        seed=shop.experiment.seed,
        hashes={"data": shop.task.data_hash, "model": shop.task.model_hash},
        started=started,
        seconds=time.perf_counter() - begun,
    )
    whole = result.model_copy(update={"provenance": about, "not_tried": missed + result.not_tried})
    return AuditResult(whole, images_of(evidence.scores, evidence.truths, shop.modality))
