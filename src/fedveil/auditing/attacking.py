"""The stages of an attacker: fit, attack in every role, score."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Finding, Links, Membership, Reconstruction
from fedveil.attacks.iterates import Iterates
from fedveil.attacks.lab import Lab
from fedveil.attacks.running import run_each
from fedveil.attacks.scene import Candidates, LocalSteps, Scene, StepOrder, Suspects
from fedveil.auditing.auxiliary import Auxiliary
from fedveil.auditing.case import Case
from fedveil.auditing.keys import (
    attack_key,
    content_key,
    described,
    described_chain,
    of_layout,
    of_public,
    of_tensors,
    of_updates,
)
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import REVISION, RoleScore, score_finding, score_given
from fedveil.auditing.store import Entry, Wanted
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates, mean_of, with_gradient
from fedveil.errors import FedveilError
from fedveil.leakage.truths import Truths
from fedveil.progress import Report, part_of
from fedveil.streams import Streams
from fedveil.tree import Tree, per_client

ITERATES = "iterates.npy"
Fitted = Mapping[str, Tensor] | None


# ---- who attacks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shown:
    """Some updates, and what else attackers who need it are shown."""

    updates: Updates
    labels: Tensor | None = None  # (V, B, ...)
    candidates: Candidates | None = None
    round: int = 1
    views: tuple[Updates, ...] = ()  # further messages about the same batches
    suspects: Suspects | None = None
    lengths: Tensor | None = None  # (V, B) tokens of each sentence


def scene_of(case: Case, attack: Attack, shown: Shown) -> Scene:
    """What an attacker who knows no defense has of some updates."""
    views = (shown.updates, *shown.views) if shown.views else ()
    updates, settings = mean_of(views) if views else shown.updates, case.settings
    unrolled = updates.kind != "gradient" and settings.local_steps == "unrolled"
    local = local_steps(updates, settings.step_order) if unrolled else None
    labels = shown.labels
    if labels is not None and local is not None and local.ordered:
        labels = sorted_rows(labels)  # who knows the labels does not know in which batch they were
    return Scene(
        public=case.public,
        updates=updates,
        streams=Streams.seeded(case.seed, range(updates.count), "attack", shown.round),
        labels=labels if "labels" in attack.needs else None,
        local=local,
        candidates=shown.candidates if "candidates" in attack.needs else None,
        suspects=shown.suspects if "suspects" in attack.needs else None,
        lengths=shown.lengths if "lengths" in attack.needs else None,
        bench=case.bench,
        views=views,
    )


def scenes_by_role(
    scene: Scene, chain: Chain, undefended: Updates | None, attackers: str = "both"
) -> dict[Role, Scene]:
    """What every attacker of a table has. A row whose update is not at hand is left out.

    So is the attacker who knows the defense where no defense says what such a one would do: it would be the naive one
    under a greater name.

    scene: of the updates as they were sent, under the chain if there is one.
    """
    found: dict[Role, Scene] = {}
    if undefended is not None:
        found["ceiling"] = replace(scene, updates=undefended, views=())  # others would be the same again
    if chain.defenses or undefended is None:
        if attackers in ("both", "naive"):
            found["naive"] = scene
        if chain.defenses and attackers in ("both", "adaptive") and chain.states_knowledge:
            found["adaptive"] = replace(scene, chain=chain)
    bare = undefended if undefended is not None else scene.updates
    noise = noise_like(bare.gradient, scene.streams.fold("floor"))
    found["noise-floor"] = replace(scene, updates=with_gradient(bare, noise), views=())
    return found


def noise_like(update: Tree, streams: Streams) -> Tree:
    """Noise with each victim's norm: what is left of an update that says nothing."""
    noise = update.map(streams.normal_like)
    scale = update.norm() / noise.norm().clamp_min(1e-30)
    return noise.map(lambda tensor: tensor * per_client(scale, tensor))


def local_steps(updates: Updates, order: StepOrder = "searched") -> LocalSteps:
    """The local training behind updates, for an attacker who repeats it and supposes this of its order."""
    return LocalSteps.of(updates, order)


# ---- fit ---------------------------------------------------------------------------------------------------


def fitted(case: Case, attack: Attack, lab: Lab, auxiliary: Auxiliary | None, key: str) -> Fitted:
    """What an attack learned before it sees a victim."""

    def make(folder: Path | None) -> Fitted:
        learned = attack.fit(lab)
        if learned is not None and not all(isinstance(each, Tensor) for each in dict(learned).values()):
            raise FedveilError(f"{type(attack).__name__}.fit must return None, or a dict of tensors by name")
        return learned  # type: ignore[no-any-return]

    examples = 0 if auxiliary is None else len(auxiliary.examples)
    about = f"{attack.name} learned from {examples} auxiliary examples under {lab.chain}"
    return case.store.keep("fit", Wanted(key, about), _FittedForm(), make)


def fit_key(case: Case, attack: Attack, lab: Lab, auxiliary: Auxiliary | None) -> str:
    """The key of what an attack learns in a lab; empty where it learns nothing."""
    if type(attack).fit is Attack.fit:
        return ""
    row = {**lab.model.before.row(0), **lab.model.buffers.row(0)}
    looks = attack.learns_about
    return content_key(
        "fit",
        attack=attack.learning or described(attack),
        public=of_public(lab.public, row, lab.model.examples) if "model" in looks else of_layout(lab.public),
        model=of_updates(lab.model) if "model" in looks else None,
        chain=described_chain(lab.chain),
        auxiliary=None if auxiliary is None else auxiliary.content,
        seed=case.seed,
        backend=case.bench.backend,
        **({"views": lab.views} if lab.views > 1 else {}),
        **({"training": case.training.described()} if "training" in looks and case.training else {}),
    )


def lab_of(case: Case, attack: Attack, scene: Scene, auxiliary: Auxiliary | None) -> Lab:
    """Where an attacker may learn what it knows of the defense: with the global model, and without any victim."""
    before = scene.updates.before.rows([0])
    model = replace(
        scene.updates,
        before=before,
        message=before.map(lambda tensor: tensor.new_zeros(tensor.shape)),
        buffers=scene.updates.buffers.rows([0]),
    )
    streams = Streams.seeded(case.seed, [0], "lab")
    chain = scene.chain if "defense" in attack.learns_about else Chain()
    views = len(scene.seen) if chain.defenses else 1  # without a defense all are the same
    examples = None if auxiliary is None else auxiliary.examples
    training = case.training if "training" in attack.learns_about else None
    return Lab(scene.public, model, examples, streams, chain, views=views, training=training)


class _FittedForm:
    """What an attack learned as an entry of the store."""

    def to_entry(self, result: Fitted, folder: Path) -> Entry:
        """Its tensors."""
        return Entry(dict(result or {}), {"nothing": result is None})

    def from_entry(self, entry: Entry) -> Fitted:
        """The same again."""
        return None if entry.facts["nothing"] else dict(entry.tensors)


# ---- attack ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Attacked:
    """What one role found, and the key of that."""

    finding: Finding
    key: str


def attacked(
    case: Case,
    attack: Attack,
    scenes: Mapping[Role, Scene],
    auxiliary: Auxiliary | None,
    report: Report | None,
    learned: dict[str, Fitted] | None = None,
) -> dict[Role, Attacked]:
    """The findings of all roles; those that are not in the store are run together, and each is kept when it is done.

    learned: by key, what this attack learned for other scenes, and now for these.
    """
    learned = {} if learned is None else learned
    labs = {role: lab_of(case, attack, scene, auxiliary) for role, scene in scenes.items()}
    fits = {role: fit_key(case, attack, lab, auxiliary) for role, lab in labs.items()}
    missing = {key: labs[role] for role, key in fits.items() if key and key not in learned}
    begin = _share_of_fitting(attack, scenes, len(missing))
    for place, (key, lab) in enumerate(missing.items()):
        start, end = (begin * done / len(missing) for done in (place, place + 1))
        told = replace(lab, report=part_of(report, start, end) if report else None)
        learned[key] = fitted(case, attack, told, auxiliary, key)
        if report:
            part_of(report, 0, end)(1, 1)
    keys = {role: attack_key(attack, scene, fits[role]) for role, scene in scenes.items()}
    rest = part_of(report, begin, 1) if report else None

    def make(missing: list[Role], folder: Path | None) -> Iterator[tuple[Role, Finding]]:
        bench = replace(case.bench, report=rest, scratch=folder)
        return run_each(attack, {r: scenes[r] for r in missing}, {r: learned.get(fits[r]) for r in missing}, bench)

    wanted = {
        role: Wanted(key, f"{attack.name}, {role}, {case.name}, {scenes[role].count} updates")
        for role, key in keys.items()
    }
    found = case.store.keep_all("attack", wanted, _FindingForm(), make)
    return {role: Attacked(found[role], keys[role]) for role in scenes}


def _share_of_fitting(attack: Attack, scenes: Mapping[Role, Scene], fits: int) -> float:
    """Which part of an attack's time goes into learning, as far as it says how long that takes."""
    if not fits:
        return 0.0
    works = [attack.estimate(scene) for scene in scenes.values()]
    learning, running = fits * max(work.fit_seconds for work in works), sum(work.seconds for work in works)
    return learning / (learning + running) if learning > 0 else 0.0


class _FindingForm:
    """A finding as an entry of the store; iterates lie in a file of their own."""

    def to_entry(self, result: Finding, folder: Path) -> Entry:
        """Its tensors, and the rest as plain data."""
        if isinstance(result, Links):
            return Entry({"scores": result.scores, "exact": result.exact}, {"seconds": result.seconds})
        if isinstance(result, Membership):
            return Entry({"scores": result.scores}, {"seconds": result.seconds})
        tensors = {"inputs": result.inputs, "labels": result.labels, "cost": result.cost}
        if result.costs is not None:
            tensors["costs"] = result.costs
        files = {}
        if isinstance(result.iterates, Iterates):
            files[ITERATES] = folder / ITERATES
            result.iterates.save(files[ITERATES])
        return Entry(tensors, {"seconds": result.seconds, "steps": list(result.steps)}, files)

    def from_entry(self, entry: Entry) -> Finding:
        """The same again."""
        tensors, seconds = entry.tensors, float(entry.facts["seconds"])
        if tensors.keys() == {"scores"}:
            return _telling(Membership(tensors["scores"], seconds))
        if "scores" in tensors:
            return _linking(Links(tensors["scores"], tensors["exact"], seconds))
        return _consistent(
            Reconstruction(
                inputs=tensors["inputs"],
                labels=tensors["labels"],
                cost=tensors["cost"],
                seconds=seconds,
                steps=[int(step) for step in entry.facts["steps"]],
                costs=tensors.get("costs"),
                iterates=Iterates.load(entry.files[ITERATES]) if ITERATES in entry.files else (),
            )
        )


def _linking(found: Links) -> Links:
    """Refuse what cannot be a finding: the store then has it made again."""
    if found.scores.dim() != 2 or found.exact.shape != found.scores.shape[:1] or found.exact.dtype != torch.bool:
        raise ValueError("scores of another form")
    return found


def _telling(found: Membership) -> Membership:
    """The same of those who tell members from others."""
    if found.scores.dim() != 2 or not found.scores.is_floating_point():
        raise ValueError("scores of another form")
    return found


def _consistent(found: Reconstruction) -> Reconstruction:
    """The same for reconstructions."""
    batches, steps = found.inputs.shape[:2], len(found.steps)
    fits = [
        found.inputs.dim() > 2 and found.inputs.is_floating_point(),
        found.labels.shape[:2] == batches,
        found.cost.shape == batches[:1],
        found.costs is None or found.costs.shape == (batches[0], steps),
        not found.iterates or (len(found.iterates) == steps and found.iterates[0].shape == found.inputs.shape),
    ]
    if not all(fits):
        raise ValueError("tensors that do not belong together")
    return found


def sorted_rows(labels: Tensor) -> Tensor:
    """The targets (V, B, ...) of every batch in an order that says nothing: by their numbers, the first first."""
    if labels.dim() == 2:
        return labels.sort(1).values
    for column in range(labels.shape[2] - 1, -1, -1):
        order = labels[:, :, column].argsort(dim=1, stable=True)
        labels = labels.gather(1, order[..., None].expand_as(labels))
    return labels


# ---- score -------------------------------------------------------------------------------------------------


def scored(case: Case, attack: Attack, found: Mapping[Role, Attacked], truths: Truths) -> list[RoleScore]:
    """The scores of all roles, each on its own."""
    scores = []
    for role, each in found.items():
        key = _score_key(case, truths, [described(attack), role, each.key])
        about = f"{attack.name}, {role}, {case.name}"

        def make(folder: Path | None, role: Role = role, each: Attacked = each) -> RoleScore:
            return score_finding(attack.name, role, each.finding, truths, case.modality)

        scores.append(case.store.keep("score", Wanted(key, about), _ScoreForm(), make))
    return scores


def scored_given(case: Case, role: Role, inputs: Tensor, truths: Truths) -> RoleScore:
    """The score of inputs that no attack made."""
    key = _score_key(case, truths, [role, of_tensors({"inputs": inputs})])
    about = f"{role}, {case.name}"
    return case.store.keep(
        "score", Wanted(key, about), _ScoreForm(), lambda folder: score_given(role, inputs, truths, case.modality)
    )


def _score_key(case: Case, truths: Truths, found: list[Any]) -> str:
    given = {name: getattr(truths, name) for name in ("originals", "labels", "seen", "distractors", "place")}
    return content_key(
        "score", found=found, truths=of_tensors(given), modality=case.modality.described(), revision=REVISION
    )


class _ScoreForm:
    """The scores of a role as an entry of the store."""

    def to_entry(self, result: RoleScore, folder: Path) -> Entry:
        """Values, exhibits and the rest."""
        return Entry(result.tensors(), json.loads(result.facts()))

    def from_entry(self, entry: Entry) -> RoleScore:
        """The same again."""
        return RoleScore.read(entry.tensors, json.dumps(entry.facts))
