"""`audit`: train under a defense, attack what was shared, show what leaked and what it cost."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.problem import LocalSteps, Reconstruction
from fedveil.attacks.tracking import Progress
from fedveil.auditing.attacking import Scene, problems_by_role, run_roles
from fedveil.auditing.check import check
from fedveil.auditing.costs import measure_cost
from fedveil.auditing.judges import compared_by
from fedveil.auditing.kept import kept
from fedveil.auditing.outcome import Outcome
from fedveil.auditing.provenance import provenance
from fedveil.auditing.result import AttackRun, Images, Result, Role, Row
from fedveil.auditing.scoring import Truths, score_attack, score_given
from fedveil.auditing.sentences import at_most
from fedveil.auditing.settings import Audit
from fedveil.auditing.verdict import judge, strongest
from fedveil.auditing.words import assumptions, attacked_words, defense_card, not_given, not_tried, protocol_words
from fedveil.clients.engine import Backend, Engine
from fedveil.defenses.base import Defense, Facts
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.observers import Observer
from fedveil.federation.perturbation import perturbation
from fedveil.federation.probe import Probe, probe
from fedveil.federation.run import Run, dry_step, engine_for, federate
from fedveil.federation.settings import Federation
from fedveil.federation.steps import Plan
from fedveil.leakage.floors import mean_image
from fedveil.leakage.identified import candidates
from fedveil.ledger.exposure import exposures
from fedveil.ledger.picking import most_picked
from fedveil.ledger.statement import statement
from fedveil.registry import attacks as attack_registry
from fedveil.registry import defenses as defense_registry
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.task import Task, holdings
from fedveil.tree import Tree
from fedveil.workers import Workers, opened


@dataclass(frozen=True)
class Watch:
    """Who is told how far an audit has come. All optional."""

    observers: tuple[Observer, ...] = ()  # of the training runs
    stage: Any = None  # called with a line that names the stage which starts
    attack: Progress | None = None


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
) -> Outcome:
    """Train a task under a defense, attack what clients share, and judge what leaked and what it cost.

    federation: how it is trained; also without training (`train=False`) its protocol, batch and rate decide what an
        update is.
    settings: which updates are attacked and how they are judged.
    folder: where the training runs keep their checkpoints, so that a stopped audit can go on with `resume=True`.
    workers: so many processes, or those of a pool, train FedAvg's clients and attack.
    """
    chain, chosen = _without_none(Chain.of(defense)), _attacks(attack)
    federation, settings, watch = federation or Federation(), settings or Audit(), watch or Watch()
    with opened(workers) as pool:
        return _audit(
            task,
            chain,
            chosen,
            federation,
            settings,
            seed,
            backend,
            device,
            folder,
            resume,
            train,
            watch,
            command,
            pool,
        )


def _audit(
    task: Task,
    chain: Chain,
    chosen: list[Attack],
    federation: Federation,
    settings: Audit,
    seed: int,
    backend: Backend,
    device: str,
    folder: Path | str | None,
    resume: bool,
    train: bool,
    watch: Watch,
    command: str,
    workers: Workers,
) -> Outcome:
    started, begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.perf_counter()
    normalization = check(task, chain, chosen, federation, settings, train=train)
    tell = watch.stage or (lambda line: None)
    engine = engine_for(task, federation, backend=backend, device=device)
    dry_step(Plan(task, chain, federation, seed, engine, torch.device(device)))
    classifier, distance, judges = compared_by(task, settings)

    defended = undefended = None
    if train:
        recorded = replace(federation, record_rounds=tuple(r for r in settings.rounds if r > 1), record_clients=1)
        common: dict[str, Any] = {"seed": seed, "backend": backend, "device": device, "observers": watch.observers}
        common["workers"] = workers if federation.protocol == "fedavg" else 1
        tell("training without a defense" if chain.defenses else "training")
        undefended = federate(task, None, recorded, folder=_sub(folder, "undefended"), resume=resume, **common)
        if chain.defenses:
            tell(f"training under {chain}")
            defended = federate(task, chain, recorded, folder=_sub(folder, "defended"), resume=resume, **common)

    probes = [
        _probe(task, chain, federation, settings, number, defended or undefended, engine, seed)
        for number in settings.rounds
    ]
    truths = replace(_truths(task, probes, settings, normalization, seed), reference=classifier, lpips=distance)
    images = _images(truths)
    rows: list[Row] = []
    runs: list[AttackRun] = []
    config = _config(task, chain, chosen, federation, settings, seed, backend, device, train)
    for each in chosen:
        tell(f"attacking with {each.name}")
        parts = []
        for number, found in zip(settings.rounds, probes, strict=True):
            problems = problems_by_role(
                _scene(task, found, number, federation, settings, normalization, seed, each),
                _at_round(chain, federation, number),
                defended=found.defended,
                undefended=found.undefended,
                attackers=settings.attackers,
            )
            run = partial(run_roles, each, problems, backend=backend, progress=watch.attack, workers=workers)
            path = None if folder is None else Path(folder) / "attacks" / f"{each.name}-round-{number}.safetensors"
            parts.append(kept(path, config | {"attack": attack_registry.describe(each)}, resume, run))
        outcome: dict[Role, Reconstruction] = {r: Reconstruction.concat([p[r] for p in parts]) for r in parts[0]}
        scored = score_attack(each.name, outcome, truths, images, labels_known=each.choices().labels == "known")
        rows += scored.rows
        runs.append(
            AttackRun(
                attack=each.name,
                settings=attack_registry.describe(each),
                seconds=sum(found.seconds for found in outcome.values()),
                restarts=each.choices().restarts,
                steps=each.choices().steps,
                victims=len(truths.originals),
                batch_size=settings.batch_size,
                label_recovery=scored.label_recovery,
                traces=scored.traces,
                ssim_at=scored.ssim_at,
            )
        )
    rows.append(score_given("mean-floor", truths.mean_image, truths, images))
    if any(each.acts_at in ("sample", "data") for each in chain.defenses):
        rows.append(score_given("bound", truths.seen, truths, images))

    tell("judging")
    lead = strongest(rows)
    rows = [row.model_copy(update={"strongest": row is lead}) for row in rows]
    cost = measure_cost(task, undefended, defended)
    moved = perturbation([(truths.originals.flatten(0, 1), truths.seen.flatten(0, 1))], normalization)
    exposed = exposures(task, federation, rounds=None if train else len(settings.rounds))
    promised = statement(chain, exposed)
    among = truths.distractors.shape[1] + 1
    verdict = judge(
        rows,
        cost,
        promised.sentence + at_most(most_picked(promised, exposed[0], among), among),
        settings=settings,
        among=among,
        config=config,
        uninformed=chain.without_knowledge,
    )
    result = Result(
        data=task.name,
        model=task.model_name,
        protocol=protocol_words(task, federation),
        attacked=attacked_words(task, federation, settings),
        label_names=list(task.label_names),
        holdings=holdings(task),
        defense=defense_card(chain, promised, probes[0].undefended, probes[0].defended, moved),
        verdict=verdict,
        rows=rows,
        identified_among=among,
        judges=judges,
        cost=cost,
        attacks=runs,
        assumptions=assumptions(task, chain, chosen, federation, settings),
        not_given=not_given(task),
        not_tried=not_tried(chain, chosen, federation, settings),
        provenance=provenance(
            command=command or "fedveil.audit(...) with the configuration below",
            config=config,
            seed=seed,
            hashes={"data": task.data_hash, "model": task.model_hash},
            started=started,
            seconds=time.perf_counter() - begun,
        ),
    )
    return Outcome(result, images)


# ---- the parts of an audit -----------------------------------------------------------------------------------


def _without_none(chain: Chain) -> Chain:
    return Chain(tuple(defense for defense in chain.defenses if defense.name != "none"))


def _attacks(given: Attack | str | Sequence[Attack | str]) -> list[Attack]:
    listed = [given] if isinstance(given, Attack | str) else list(given)
    made = [attack_registry.parse(each) if isinstance(each, str) else each for each in listed]
    names = [each.name for each in made]
    if len(set(names)) < len(names):
        raise FedveilError(f"each attack can be named once in an audit (got {', '.join(names)})")
    return made


def _at_round(chain: Chain, federation: Federation, number: int) -> Chain:
    """In a warm-up round there is no defense, and an attacker who knows it knows that too."""
    return Chain(()) if number <= federation.warmup_rounds else chain


def _probe(
    task: Task,
    chain: Chain,
    federation: Federation,
    settings: Audit,
    number: int,
    run: Run | None,
    engine: Engine,
    seed: int,
) -> Probe:
    """What the victims share at the start of a round."""
    params = {name: p.detach() for name, p in task.model.named_parameters() if p.requires_grad}
    buffers: dict[str, Tensor] = {name: b.detach() for name, b in task.model.named_buffers()}
    if number > 1:
        assert run is not None
        capture = next(each.capture for each in run.captured if each.capture.round == number)
        params, buffers = dict(capture.before), dict(capture.buffers_before or buffers)
    return probe(
        task,
        chain,
        federation,
        params=params,
        buffers=buffers,
        round=number,
        victims=settings.victims,
        batch_size=settings.batch_size,
        source=settings.source,
        seed=seed,
        engine=engine,
    )


def _scene(
    task: Task,
    found: Probe,
    number: int,
    federation: Federation,
    settings: Audit,
    normalization: Normalization,
    seed: int,
    each: Attack,
) -> Scene:
    """What the attacker knows of the updates of a round."""
    victims, size = found.targets.shape
    local = None
    if federation.protocol == "fedavg" and settings.local_steps == "unrolled":
        local = LocalSteps(
            steps=found.steps,
            batch_size=min(federation.batch_size, size),
            lr=found.lr[0],
            momentum=found.momentum,
            weight_decay=federation.weight_decay,
        )
    return Scene(
        model=task.model,
        loss=task.loss,
        params=Tree.expand(found.params, victims),
        buffers=Tree.expand(found.buffers_before, victims),
        shape=task.shape,
        batch_size=size,
        classes=task.classes,
        normalization=normalization,
        facts=Facts(kind=found.kind, batch_size=size, steps=found.steps, lr=found.lr[0], momentum=found.momentum),
        streams=Streams.seeded(seed, range(victims), "attack", number),
        labels=found.targets if each.choices().labels == "known" else None,
        local=local,
    )


def _truths(task: Task, probes: list[Probe], settings: Audit, normalization: Normalization, seed: int) -> Truths:
    originals = torch.cat([_tensor(found.inputs) for found in probes])
    labels = torch.cat([found.targets for found in probes])
    pool = _held_out(task, settings)
    images, classes = pool.batch(list(range(len(pool))))
    flat = originals.flatten(0, 1)
    chosen = candidates(flat, labels.flatten(), _tensor(images), classes, count=settings.candidates, seed=seed)
    return Truths(
        originals=originals,
        labels=labels,
        seen=torch.cat([_tensor(found.seen) for found in probes]),
        distractors=_tensor(images)[chosen],
        mean_image=_mean_image(task.train),
        normalization=normalization,
    )


def _held_out(task: Task, settings: Audit, most: int = 20_000) -> Examples:
    """Images that no victim holds: the test examples, less those that are victims themselves."""
    taken = settings.victims * settings.batch_size if settings.source == "test" else 0
    return task.test.subset(list(range(taken, min(len(task.test), taken + most))))


def _mean_image(train: Examples) -> Tensor:
    """The mean over all training images, read a part at a time."""
    # One part in memory at a time: a large data set need not fit.
    means = torch.stack([mean_image(_tensor(inputs)).double() * len(labels) for inputs, labels in train.batches(4096)])
    return (means.sum(0) / len(train)).to(torch.get_default_dtype())


def _tensor(inputs: Any) -> Tensor:
    assert isinstance(inputs, Tensor)  # `check` admits images only
    return inputs


def _images(truths: Truths) -> Images:
    pixels = truths.normalization.pixels(truths.originals.flatten(0, 1)).clamp(0, 1)
    return Images(pixels.float().numpy(), truths.labels.flatten().numpy())


def _config(
    task: Task,
    chain: Chain,
    chosen: Iterable[Attack],
    federation: Federation,
    settings: Audit,
    seed: int,
    backend: str,
    device: str,
    train: bool,
) -> dict[str, Any]:
    from fedveil.fields import field_values

    return {
        "task": task.description,
        "defense": [defense_registry.describe(each) for each in chain.defenses],
        "attack": [attack_registry.describe(each) for each in chosen],
        "federation": {**field_values(federation), "train": train},
        "audit": field_values(settings),
        "seed": seed,
        "backend": backend,
        "device": device,
    }


def _sub(folder: Path | str | None, name: str) -> Path | None:
    return None if folder is None else Path(folder) / name
