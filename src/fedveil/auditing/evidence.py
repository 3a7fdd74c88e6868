"""What all attacks of an audit got, of all attacked rounds: observe, fit, attack, score."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.matching import GradientMatching
from fedveil.auditing.attacking import Fitted, Shown, attacked, scene_of, scenes_by_role, scored, scored_given
from fedveil.auditing.candidates import RoundTruth, truth_of
from fedveil.auditing.case import Case
from fedveil.auditing.forecast import attack_line, round_of
from fedveil.auditing.judgment import Terms
from fedveil.auditing.membership import (
    member_score,
    model_scenes,
    outsiders,
    pool_of_model,
    pool_of_updates,
    update_scene,
)
from fedveil.auditing.observing import Observed, observe
from fedveil.auditing.result import AttackRun
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import Batches, RoleScore, attack_run, rows_of
from fedveil.auditing.training import Trained
from fedveil.auditing.verdict import settled
from fedveil.auditing.workshop import Workshop
from fedveil.defenses.chain import Chain
from fedveil.leakage.truths import Truths
from fedveil.registry import attacks as attack_registry
from fedveil.tasks.text_form import NO_TOKEN

Attackable = list[tuple[Observed, RoundTruth]]  # round by round


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a verdict is made from."""

    observed: list[Observed]
    truths: Truths  # of all rounds, one behind the other
    attacks: list[Attack]  # that were run
    scores: list[RoleScore]
    runs: list[AttackRun]
    left_out: dict[str, str]  # why other attacks were not run, by their names

    @property
    def among(self) -> int:
        """The candidates from which the right one is picked."""
        assert self.truths.distractors is not None
        return self.truths.distractors.shape[1] + 1

    @property
    def auxiliary_used(self) -> bool:
        """Whether any of the attacks learned from auxiliary data."""
        return any("auxiliary" in each.needs for each in self.attacks)


def gather(shop: Workshop, bare: Trained | None, defended: Trained | None) -> Evidence:
    """Observe every attacked round, attack it and score what was found.

    bare, defended: the runs without the defense and with it, as far as there are any; the last is attacked.
    """
    found = defended or bare
    observed = [observe(shop, number, found) for number in shop.experiment.audit.rounds]
    rounds = [
        (each, truth_of(shop.case, each.originals, shop.held_out, one_example=shop.one_example)) for each in observed
    ]
    truths = _joined([true.truths for _, true in rounds])
    parts = [scores_without_attack(shop.case, shop.chain, true.truths) for _, true in rounds]
    without = [RoleScore.concat(each) for each in zip(*parts, strict=True)]
    made = Evidence(observed, truths, [], [], [], dict(shop.lineup.left_out))
    for attack in shop.lineup.attacks:
        by = _settled_by(shop, attack, made, without) if shop.experiment.stops else ""
        if by:
            made.left_out[attack.name] = f"not run, as the question was settled by {by}"
            continue
        shop.tell(attack_line(attack.name))
        own = (
            _tell(shop, attack, observed, (bare, defended))
            if attack.question == "member"
            else _attack(shop, attack, rounds)
        )
        made.attacks.append(attack)
        made.runs.append(run_of(attack, own, truths))
        made.scores.extend(own)
    made.scores.extend(without)
    return made


def _settled_by(shop: Workshop, attack: Attack, made: Evidence, without: list[RoleScore]) -> str:
    """The attacks that settled the question of this one already, by those who have no more than it; "" if none did.

    What one who has more gets says nothing of how little is enough: that is still to be found out.
    """
    if attack.question == "member":
        return ""  # that an update tells it says nothing of the model, and these attacks take seconds
    names = [
        each.name
        for each in made.attacks
        if each.question == attack.question and set(each.threat.has) <= set(attack.threat.has)
    ]
    scores = [each for each in made.scores if each.attack in names]
    if not scores:
        return ""
    rows = rows_of([*scores, *without], made.truths, shop.modality)
    terms = Terms(shop.experiment.audit, shop.modality, made.among)
    return " and ".join(names) if settled(rows, attack.question, terms) else ""


def _attack(shop: Workshop, attack: Attack, rounds: Attackable) -> list[RoleScore]:
    """Every role of one attack in every round, scored; the rounds of a role are joined."""
    parts: list[dict[Role, RoleScore]] = []
    learned: dict[str, Fitted] = {}
    for place, (observed, true) in enumerate(rounds):
        lengths = None if shop.task.text is None else (observed.inputs != NO_TOKEN).sum(-1)
        shown = Shown(
            observed.defended, observed.labels, true.candidates, observed.round, observed.views, lengths=lengths
        )
        scenes = scenes_by_role(
            scene_of(shop.case, attack, shown),
            shop.experiment.chain_at(observed.round),
            observed.undefended,
            shop.experiment.audit.attackers,
        )
        report = round_of(shop.watch.attack, place, len(rounds))
        found = attacked(shop.case, attack, scenes, shop.auxiliary, report, learned)
        parts.append({score.role: score for score in scored(shop.case, attack, found, true.truths)})
    return [RoleScore.concat([part[role] for part in parts]) for role in parts[0]]


def _tell(
    shop: Workshop, attack: Attack, observed: list[Observed], runs: tuple[Trained | None, Trained | None]
) -> list[RoleScore]:
    """Every role of an attack that tells members from others: in every round, or of the trained model."""
    others, learned = outsiders(shop), dict[str, Fitted]()
    if attack.looks_at == "model":
        pool = pool_of_model(shop, others)
        scenes = model_scenes(shop, attack, runs, pool)
        found = attacked(shop.case, attack, scenes, shop.auxiliary, shop.watch.attack, learned)
        return [member_score(attack, role, each.finding, pool) for role, each in found.items()]
    parts: list[dict[Role, RoleScore]] = []
    for place, each in enumerate(observed):
        pool = pool_of_updates(shop, each, others)
        scenes = scenes_by_role(
            update_scene(shop, attack, each, pool),
            shop.experiment.chain_at(each.round),
            each.undefended,
            shop.experiment.audit.attackers,
        )
        report = round_of(shop.watch.attack, place, len(observed))
        got = attacked(shop.case, attack, scenes, shop.auxiliary, report, learned)
        parts.append({role: member_score(attack, role, one.finding, pool) for role, one in got.items()})
    return [RoleScore.concat([part[role] for part in parts]) for role in parts[0]]


def scores_without_attack(case: Case, chain: Chain, truths: Truths) -> list[RoleScore]:
    """What the mean input is worth and, where a defense changes inputs, what a perfect inversion would see."""
    given: list[tuple[Role, Tensor]] = []
    if any(each.acts_at in ("sample", "data") for each in chain.defenses):
        given.append(("bound", truths.seen))
    if truths.mean_input is not None:
        given.append(("mean-floor", truths.mean_input))
    return [scored_given(case, role, inputs, truths) for role, inputs in given]


def run_of(attack: Attack, scores: list[RoleScore], truths: Batches) -> AttackRun:
    """How an attack went, with its settings."""
    recipe = attack.recipe() if isinstance(attack, GradientMatching) else None
    return attack_run(
        scores,
        truths,
        attack_registry.describe(attack),
        labels_known="labels" in attack.needs,
        steps=recipe.steps if recipe else None,
        restarts=len(recipe.tries) if recipe else None,
    )


def _joined(parts: list[Truths]) -> Truths:
    """The truths of several rounds as one."""
    names = ("originals", "labels", "seen", "distractors", "place")
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **tensors, rounds=tuple(number for part in parts for number in part.rounds))
