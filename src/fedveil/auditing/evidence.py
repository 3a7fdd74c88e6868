"""What all attacks of an audit got, of all attacked rounds: observe, fit, attack, score."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedveil.attacks.base import Attack
from fedveil.attacks.matching import GradientMatching
from fedveil.attacks.scene import Scene
from fedveil.auditing.attacking import attacked, local_steps, scenes_by_role, scored, scored_given
from fedveil.auditing.forecast import attack_line, round_of
from fedveil.auditing.observing import HeldOut, Observed, Truth, observe, truth_of
from fedveil.auditing.result import AttackRun
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import RoleScore, attack_run
from fedveil.auditing.training import Trained
from fedveil.auditing.workshop import Workshop
from fedveil.leakage.truths import Truths
from fedveil.registry import attacks as attack_registry
from fedveil.streams import Streams

Attackable = list[tuple[Observed, Truth]]  # round by round


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
    held_out, mean_input = HeldOut.of(shop), shop.modality.floor(shop.task.train)
    rounds = [(each, truth_of(shop, each, held_out, mean_input)) for each in observed]
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
        runs.append(_run(attack, own, truths))
        scores += own
    perturbed = any(each.acts_at in ("sample", "data") for each in shop.chain.defenses)
    for role in ("bound", "mean-floor") if perturbed else ("mean-floor",):
        given = [(true.truths.seen if role == "bound" else mean_input, true.truths) for _, true in rounds]
        scores.append(RoleScore.concat([scored_given(shop.case, role, *each) for each in given]))
    return Evidence(observed, truths, scores, runs, skipped)


def _attack(shop: Workshop, attack: Attack, rounds: Attackable, held_out: HeldOut) -> list[RoleScore]:
    """Every role of one attack in every round, scored; the rounds of a role are joined."""
    parts: list[dict[Role, RoleScore]] = []
    for place, (observed, true) in enumerate(rounds):
        scenes = scenes_by_role(
            scene_of(shop, attack, observed, true),
            shop.experiment.chain_at(observed.round),
            observed.undefended,
            shop.experiment.audit.attackers,
        )
        report = round_of(shop.watch.attack, place, len(rounds))
        found = attacked(shop.case, attack, scenes, held_out.auxiliary, report)
        parts.append({score.role: score for score in scored(shop.case, attack, found, true.truths)})
    return [RoleScore.concat([part[role] for part in parts]) for role in parts[0]]


def scene_of(shop: Workshop, attack: Attack, observed: Observed, true: Truth) -> Scene:
    """What an attacker who knows no defense has of the updates of a round."""
    updates, settings = observed.defended, shop.experiment.audit
    unrolled = updates.kind != "gradient" and settings.local_steps == "unrolled"
    return Scene(
        public=shop.case.public,
        updates=updates,
        streams=Streams.seeded(shop.experiment.seed, range(updates.count), "attack", observed.round),
        labels=observed.labels if "labels" in attack.needs else None,
        local=local_steps(updates) if unrolled else None,
        candidates=true.candidates if "candidates" in attack.needs else None,
        bench=shop.case.bench,
    )


def _run(attack: Attack, scores: list[RoleScore], truths: Truths) -> AttackRun:
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
