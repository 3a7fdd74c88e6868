"""`audit`: train under a defense, attack what was shared, show what leaked and what it cost.

The stages: train -> observe -> fit -> attack in every role -> score -> judge. Each but the last is kept in a store.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fedveil.attacks.base import Attack
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.cost import measure_cost
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.forecast import both, stages_of
from fedveil.auditing.observing import observe, reached
from fedveil.auditing.provenance import provenance
from fedveil.auditing.scoring import images_of
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.auditing.training import train_both
from fedveil.auditing.workshop import Workshop
from fedveil.clients.engine import Backend
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.federation.observers import Watch
from fedveil.federation.progress import watch_with
from fedveil.federation.settings import FederationSettings
from fedveil.progress import Meter, style_for
from fedveil.tasks.task import Task
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
    experiment = (
        task
        if isinstance(task, Experiment)
        else Experiment(
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
