"""`audit`: train under a defense, attack what was shared, show what leaked and what it cost."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedveil.attacks.base import Attack
from fedveil.attacks.problem import Reconstruction
from fedveil.auditing.asked import Asked, read_attacks, read_defense
from fedveil.auditing.attacking import problems_by_role, run_roles
from fedveil.auditing.check import check
from fedveil.auditing.costs import measure_cost
from fedveil.auditing.judges import compared_by
from fedveil.auditing.kept import content_key, kept
from fedveil.auditing.observing import Observed, observe, reached, scene, truths
from fedveil.auditing.outcome import Outcome
from fedveil.auditing.provenance import provenance
from fedveil.auditing.result import AttackRun, Images, Result, Role, Row
from fedveil.auditing.scoring import Truths, rows_by_round, score_attack, score_given
from fedveil.auditing.sentences import at_most
from fedveil.auditing.settings import Audit
from fedveil.auditing.stages import both, round_of, stages_of, training_stages
from fedveil.auditing.verdict import judge, strongest
from fedveil.auditing.words import assumptions, attacked_words, defense_card, not_given, not_tried, protocol_words
from fedveil.clients.engine import Backend
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.federation.observers import Watch
from fedveil.federation.perturbation import perturbation
from fedveil.federation.plan import Plan
from fedveil.federation.prepare import prepare
from fedveil.federation.progress import watch_with
from fedveil.federation.run import Run, federate
from fedveil.federation.settings import Federation
from fedveil.ledger.exposure import exposures
from fedveil.ledger.picking import most_picked
from fedveil.ledger.statement import statement
from fedveil.ownership import owned
from fedveil.progress import Meter, style_for
from fedveil.registry import attacks as attack_registry
from fedveil.tasks.task import Task, holdings
from fedveil.workers import Workers, opened


def audit(
    task: Task,
    defense: Defense | Chain | Sequence[Defense] | str | None = None,
    attack: Attack | str | Sequence[Attack | str] = "inverting-gradients",
    *,
    federation: Federation | None = None,
    settings: Audit | None = None,
    seed: int = 0,
    backend: Backend = "auto",
    device: str = "cpu",
    folder: Path | str | None = None,
    resume: bool = False,
    train: bool = True,
    watch: Watch | None = None,
    command: str = "",
    workers: int | Workers = 1,
    progress: bool | None = None,
) -> Outcome:
    """Train a task under a defense, attack what clients share, and judge what leaked and what it cost.

    federation: how it is trained; also without training (`train=False`) its protocol, batch and rate decide what an
        update is.
    settings: which updates are attacked and how they are judged.
    folder: where the training runs keep their checkpoints, so that a stopped audit can go on with `resume=True`. One
        audit at a time has a folder: another is refused.
    workers: so many processes, or those of a pool, train FedAvg's clients and attack.
    progress: show stages and the time left; by default on a terminal and in a notebook only, and not beside a `watch`.
    """
    asked = Asked(
        task=task,
        chain=read_defense(defense),
        attacks=read_attacks(attack),
        federation=federation or Federation(),
        settings=settings or Audit(),
        seed=seed,
        backend=backend,
        device=device,
        train=train,
        folder=None if folder is None else Path(folder),
        resume=resume,
    )
    with ExitStack() as stack:
        stack.enter_context(owned(folder))
        pool = stack.enter_context(opened(workers))
        if watch is None or progress:
            watch = both(watch, watch_with(stack.enter_context(Meter(style_for(progress)))))
        return _audit(asked, watch, command or "fedveil.audit(...) with the configuration below", pool)


def _audit(asked: Asked, watch: Watch, command: str, workers: Workers) -> Outcome:
    started, begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.perf_counter()
    normalization = check(asked)
    task, federation, config = asked.task, asked.federation, asked.config()
    tell: Callable[[str], None] = watch.stage or (lambda line: None)
    if watch.plan:
        watch.plan(stages_of(asked))
    prepared = prepare(Plan(task, asked.chain, federation, asked.seed), backend=asked.backend, device=asked.device)
    classifier, distance, judges = compared_by(task, asked.settings)

    # What is wrong with a victim's data shows before anything is trained.
    first = observe(asked, 1, None, prepared) if 1 in asked.settings.rounds else None
    undefended, defended = _trained(asked, watch, tell, workers)
    run = defended or undefended
    asked, missed = reached(asked, run)
    settings = asked.settings
    observed = [first if first and n == 1 else observe(asked, n, run, prepared) for n in settings.rounds]
    true = replace(truths(asked, observed, normalization), reference=classifier, lpips=distance)
    images = _images(true)
    rows, runs = _attacked(asked, observed, true, images, watch, tell, workers)
    rows.append(score_given("mean-floor", true.mean_image, true, images))
    if any(each.acts_at in ("sample", "data") for each in asked.chain.defenses):
        rows.append(score_given("bound", true.seen, true, images))

    tell("judging")
    lead = strongest(rows)
    rows = [row.model_copy(update={"strongest": row is lead}) for row in rows]
    rows += rows_by_round(rows, true)
    cost = measure_cost(task, undefended, defended)
    moved = perturbation([(true.originals.flatten(0, 1), true.seen.flatten(0, 1))], normalization)
    trained = len(defended.history) if defended else None
    alone = None if asked.train else len(settings.rounds)
    exposed = exposures(task, federation, rounds=alone, trained=trained)
    promised = statement(asked.chain, exposed)
    among = true.distractors.shape[1] + 1
    verdict = judge(
        rows,
        cost,
        promised.sentence + at_most(most_picked(promised, exposed[0], among), among),
        settings=settings,
        among=among,
        config=config,
        uninformed=asked.chain.without_knowledge,
    )
    some = observed[0].probe
    result = Result(
        data=task.name,
        model=task.model_name,
        protocol=protocol_words(task, federation),
        attacked=attacked_words(task, federation, settings),
        label_names=list(task.label_names),
        holdings=holdings(task),
        defense=defense_card(asked.chain, promised, some.undefended.gradient, some.defended.gradient, moved),
        verdict=verdict,
        rows=rows,
        identified_among=among,
        judges=judges,
        cost=cost,
        attacks=runs,
        assumptions=assumptions(task, asked.chain, asked.attacks, federation, settings),
        not_given=not_given(task),
        not_tried=missed + not_tried(asked.chain, asked.attacks, federation, settings),
        provenance=provenance(
            command=command,
            config=config,
            seed=asked.seed,
            hashes={"data": task.data_hash, "model": task.model_hash},
            started=started,
            seconds=time.perf_counter() - begun,
        ),
    )
    return Outcome(result, images)


# ---- the stages of an audit ----------------------------------------------------------------------------------


def _trained(
    asked: Asked, watch: Watch, tell: Callable[[str], None], workers: Workers
) -> tuple[Run | None, Run | None]:
    """The runs without the defense and with it, as far as they were asked for."""
    if not asked.train:
        return None, None
    later = tuple(number for number in asked.settings.rounds if number > 1)
    recorded = replace(asked.federation, record_rounds=later, record_clients=1)

    def run(chain: Chain | None, name: str) -> Run:
        return federate(
            asked.task,
            chain,
            recorded,
            seed=asked.seed,
            backend=asked.backend,
            device=asked.device,
            observers=watch.observers,
            progress=False,
            folder=asked.inside(name),
            resume=asked.resume,
            workers=workers if recorded.protocol == "fedavg" else 1,
        )

    bare, *defended = training_stages(asked)
    tell(bare.line)
    undefended = run(None, "undefended")
    if not defended:
        return undefended, None
    tell(defended[0].line)
    return undefended, run(asked.chain, "defended")


def _attacked(
    asked: Asked,
    observed: list[Observed],
    true: Truths,
    images: Images,
    watch: Watch,
    tell: Callable[[str], None],
    workers: Workers,
) -> tuple[list[Row], list[AttackRun]]:
    """Every attack on every round, from its file where it was kept, and scored."""
    rows: list[Row] = []
    runs: list[AttackRun] = []
    for attack in asked.attacks:
        tell(f"attacking with {attack.name}")
        parts = []
        for place, each in enumerate(observed):
            problems = problems_by_role(
                scene(asked, each, true.normalization, attack),
                asked.chain_at(each.round),
                defended=each.probe.defended.gradient,
                undefended=each.probe.undefended.gradient,
                attackers=asked.settings.attackers,
            )
            report = round_of(watch.attack, place, len(observed))
            run = partial(run_roles, attack, problems, backend=asked.backend, progress=report, workers=workers)
            path = asked.inside("attacks", f"{attack.name}-round-{each.round}.safetensors")
            parts.append(kept(path, partial(content_key, attack, problems, asked.backend), asked.resume, run))
        found: dict[Role, Reconstruction] = {r: Reconstruction.concat([p[r] for p in parts]) for r in parts[0]}
        choices = attack.choices()
        scored = score_attack(attack.name, found, true, images, labels_known=choices.labels == "known")
        rows += scored.rows
        runs.append(
            AttackRun(
                attack=attack.name,
                settings=attack_registry.describe(attack),
                seconds=sum(each.seconds for each in found.values()),
                restarts=choices.restarts,
                steps=choices.steps,
                victims=len(true.originals),
                batch_size=asked.settings.batch_size,
                label_recovery=scored.label_recovery,
                traces=scored.traces,
                ssim_at=scored.ssim_at,
            )
        )
    return rows, runs


def _images(true: Truths) -> Images:
    pixels = true.normalization.pixels(true.originals.flatten(0, 1)).clamp(0, 1)
    return Images(pixels.float().numpy(), true.labels.flatten().numpy())
