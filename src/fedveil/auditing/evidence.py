"""What all attacks of an audit got, of all attacked rounds: observe, fit, attack, score."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.matching import GradientMatching
from fedveil.auditing.attacking import Shown, attacked, scene_of, scenes_by_role, scored, scored_given
from fedveil.auditing.candidates import HeldOut, RoundTruth, truth_of
from fedveil.auditing.forecast import attack_line, round_of
from fedveil.auditing.observing import Observed, observe
from fedveil.auditing.result import AttackRun
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import Batches, RoleScore, attack_run
from fedveil.auditing.training import Trained
from fedveil.auditing.workshop import Case, Workshop
from fedveil.defenses.chain import Chain
from fedveil.leakage.truths import Truths
from fedveil.registry import attacks as attack_registry

Attackable = list[tuple[Observed, RoundTruth]]  # round by round


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a verdict is made from."""

    observed: list[Observed]
    truths: Truths  # of all rounds, one behind the other
    scores: list[RoleScore]
    runs: list[AttackRun]
    skipped: list[str]  # a line on each attack that could not be run, and why

    @property
    def among(self) -> int:
        """The candidates from which the right one is picked."""
        assert self.truths.distractors is not None
        return self.truths.distractors.shape[1] + 1


def gather(shop: Workshop, found: Trained | None) -> Evidence:
    """Observe every attacked round, attack it and score what was found."""
    observed = [observe(shop, number, found) for number in shop.experiment.audit.rounds]
    held_out = _held_out(shop)
    rounds = [(each, truth_of(shop.case, each.originals, held_out, one_example=shop.one_example)) for each in observed]
    truths = _joined([true.truths for _, true in rounds])
    scores: list[RoleScore] = []
    runs: list[AttackRun] = []
    skipped = []
    for attack in shop.experiment.attacks:
        if "auxiliary" in attack.needs and held_out.auxiliary is None:
            skipped.append(f"the attack {attack.name}: there are no auxiliary data for it to learn from")
            continue
        shop.tell(attack_line(attack.name))
        own = _attack(shop, attack, rounds, held_out)
        runs.append(run_of(attack, own, truths))
        scores += own
    given = [scores_without_attack(shop.case, shop.chain, true.truths) for _, true in rounds]
    scores += [RoleScore.concat(parts) for parts in zip(*given, strict=True)]
    return Evidence(observed, truths, scores, runs, skipped)


def _attack(shop: Workshop, attack: Attack, rounds: Attackable, held_out: HeldOut) -> list[RoleScore]:
    """Every role of one attack in every round, scored; the rounds of a role are joined."""
    parts: list[dict[Role, RoleScore]] = []
    for place, (observed, true) in enumerate(rounds):
        scenes = scenes_by_role(
            scene_of(shop.case, attack, Shown(observed.defended, observed.labels, true.candidates, observed.round)),
            shop.experiment.chain_at(observed.round),
            observed.undefended,
            shop.experiment.audit.attackers,
        )
        report = round_of(shop.watch.attack, place, len(rounds))
        found = attacked(shop.case, attack, scenes, held_out.auxiliary, report)
        parts.append({score.role: score for score in scored(shop.case, attack, found, true.truths)})
    return [RoleScore.concat([part[role] for part in parts]) for role in parts[0]]


def _held_out(shop: Workshop) -> HeldOut:
    settings = shop.experiment.audit
    taken = settings.victims * settings.batch_size if settings.source == "test" else 0
    learns = any("auxiliary" in attack.needs for attack in shop.experiment.attacks)
    return HeldOut.of(shop.modality, shop.task.train, shop.task.test, taken=taken, learns=learns)


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
