"""Who was a member: which examples are in question, who looks at what, and the rows that come of it.

Two things are looked at: single updates, whose members are the examples behind each, and the model that training came
to, whose members are all of the clients' examples. Others are held-out examples that no attacker has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Finding, Membership
from fedveil.attacks.scene import Scene, Suspects
from fedveil.attacks.threat import ThreatModel
from fedveil.auditing.attackers import threat_of_row
from fedveil.auditing.attacking import Shown, noise_like, scene_of
from fedveil.auditing.auxiliary import places_apart
from fedveil.auditing.candidates import single
from fedveil.auditing.observing import Observed
from fedveil.auditing.result import Roc, Row
from fedveil.auditing.roles import ATTACKERS, Role
from fedveil.auditing.scoring import RoleScore, estimate
from fedveil.auditing.training import Trained
from fedveil.auditing.workshop import Workshop
from fedveil.clients.engine import Tensors
from fedveil.defenses.guarantee import Exposure
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.leakage.membership import AUC, LEFT_OUT, MEMBER, OTHER, RATES, told
from fedveil.ledger.statement import Statement
from fedveil.ledger.telling import Curve, area, from_model, from_update
from fedveil.streams import Streams
from fedveil.tasks.model_check import floating_type
from fedveil.tree import Tree

MOST_CORNERS = 200  # of a ROC curve that a result keeps
Bounds = Mapping[bool, Mapping[str, float]]  # whether of the model -> metric -> what any attacker at all may get


# ---- which examples ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pool:
    """Examples in question, and which of them were used: attackers see the first, scoring alone the second."""

    suspects: Suspects
    kinds: Tensor  # (V, N) of `MEMBER`, `OTHER`, `LEFT_OUT`


Given = tuple[Tensor, Tensor]  # inputs and labels


def outsiders(shop: Workshop) -> Given:
    """Held-out examples that nobody trains on, that are copies of none such, and that no attacker learns from."""
    task, settings, held_out = shop.task, shop.experiment.audit, shop.held_out
    taken = settings.victims * settings.batch_size if settings.source == "test" else 0
    others = [task.train, task.test.subset(range(taken))]
    apart = torch.tensor(places_apart(held_out.judged, others, task), dtype=torch.int64)
    if not len(apart):
        raise FedveilError(
            "whoever tells members from others needs held-out examples that are no members: there are none"
        )
    drawn = Streams.seeded(shop.case.seed, [0], "others").permutation(len(apart))[0, : settings.nonmembers]
    chosen = apart[drawn.sort().values]
    return held_out.inputs[chosen], held_out.labels[chosen]


def pool_of_updates(shop: Workshop, observed: Observed, others: Given) -> Pool:
    """The examples behind all attacked updates of a round, and others. Of each update its own examples are members."""
    victims, size = observed.labels.shape[:2]
    owner = torch.arange(victims).repeat_interleave(size)
    own = torch.where(torch.arange(victims)[:, None] == owner, MEMBER, LEFT_OUT)
    rest = own.new_full((victims, len(others[1])), OTHER)
    members = observed.inputs.flatten(0, 1), observed.labels.flatten(0, 1)
    return _mixed(shop, members, others, torch.cat([own, rest], 1))


def pool_of_model(shop: Workshop, others: Given) -> Pool:
    """Examples of the clients, at most as many as may be others, and the others."""
    held = torch.cat([each.cpu() for each in shop.task.clients])
    drawn = Streams.seeded(shop.case.seed, [0], "members").permutation(len(held))[0]
    inputs, labels = shop.task.train.batch(held[drawn[: shop.experiment.audit.nonmembers]].sort().values)
    kinds = torch.cat([torch.full((len(labels),), MEMBER), torch.full((len(others[1]),), OTHER)])[None]
    return _mixed(shop, (single(inputs), labels), others, kinds)


def _mixed(shop: Workshop, members: Given, others: Given, kinds: Tensor) -> Pool:
    """In a drawn order, so that no order gives members away. In every round the others stand at the same places."""
    order = Streams.seeded(shop.case.seed, [0], "examples in question").permutation(kinds.shape[1])[0]
    inputs, labels = (torch.cat([own.cpu(), other.cpu()])[order] for own, other in zip(members, others, strict=True))
    kind = floating_type(shop.case.public.model) if shop.case.public.layout.text is None else torch.float32
    return Pool(Suspects(inputs.to(kind), labels), kinds[:, order])


# ---- who looks at what ---------------------------------------------------------------------------------------


def update_scene(shop: Workshop, attack: Attack, observed: Observed, pool: Pool) -> Scene:
    """What one has who looks at the updates of a round and knows no defense."""
    shown = Shown(observed.defended, round=observed.round, views=observed.views, suspects=pool.suspects)
    return scene_of(shop.case, attack, shown)


def model_scenes(
    shop: Workshop, attack: Attack, runs: tuple[Trained | None, Trained | None], pool: Pool
) -> dict[Role, Scene]:
    """What every attacker has who looks at the trained model alone: trained without the defense, and with it.

    The floor is the first model with noise in place of all that training changed.
    """
    bare, defended = runs
    assert bare is not None  # `lineup` leaves these attacks out where nothing is trained
    model, attackers = shop.task.model, shop.experiment.audit.attackers
    first = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    untrained: Tensors = {name: b.detach() for name, b in model.named_buffers()}
    plain = _of_model(shop, attack, bare.run.params, bare.run.buffers, pool)
    found: dict[Role, Scene] = {"ceiling": plain}
    if defended is not None:
        under = _of_model(shop, attack, defended.run.params, defended.run.buffers, pool)
        if attackers in ("both", "naive"):
            found["naive"] = under
        if attackers in ("both", "adaptive") and shop.chain.states_knowledge:
            found["adaptive"] = replace(under, chain=shop.chain)
    start = Tree.expand({name: tensor.to(bare.run.params[name]) for name, tensor in first.items()}, 1)
    noise = noise_like(plain.updates.before - start, plain.streams.fold("floor"))
    found["noise-floor"] = _of_model(shop, attack, (start + noise).row(0), untrained, pool)
    return found


def _of_model(shop: Workshop, attack: Attack, params: Tensors, buffers: Tensors, pool: Pool) -> Scene:
    before = Tree.expand(params, 1)
    nothing = Updates(
        kind="gradient",
        before=before,
        message=before.map(torch.zeros_like),
        buffers=Tree.expand(buffers, 1),
        lr=(shop.experiment.federation.lr,),
        batch_sizes=(1,),
    )
    return scene_of(shop.case, attack, Shown(nothing, suspects=pool.suspects))


# ---- what they got -------------------------------------------------------------------------------------------


def member_score(attack: Attack, role: Role, finding: Finding, pool: Pool) -> RoleScore:
    """What one role of an attack got."""
    if not isinstance(finding, Membership) or finding.scores.shape != pool.kinds.shape:
        raise FedveilError(f"{attack.name} must give a score of every example in question for every update")
    return RoleScore(
        *(attack.name, role, "member", {}),
        scores=finding.scores.double().cpu(),
        kinds=pool.kinds,
        of_model=attack.looks_at == "model",
        seconds=finding.seconds,
    )


def bounds_of(promised: Statement, exposure: Exposure, views: int = 1) -> Bounds:
    """What the formal guarantee leaves to any attacker at all, of the model and of an update; empty where nothing."""
    return {True: _measured(from_model(promised)), False: _measured(from_update(promised, exposure, views))}


def _measured(curve: Curve | None) -> dict[str, float]:
    if curve is None:
        return {}
    return {AUC: area(curve)} | {name: curve(rate) for name, rate in RATES.items()}


def member_rows(
    scores: Sequence[RoleScore],
    rounds: Sequence[int],
    *,
    bounds: Bounds | None = None,
    threats: Mapping[str, ThreatModel] | None = None,
    views: int = 1,
) -> list[Row]:
    """The rows of those who tell members from others: over all rounds, then round by round.

    rounds: of every update. Attacks are not taken together: the one that tells most is the strongest, and judged as
    one of several that were tried.
    """
    made: list[Row] = []
    later: list[Row] = []
    for score in scores:
        allowed = (bounds or {}).get(score.of_model, {}) if score.role in ATTACKERS else {}
        threat = None
        if threats is not None:
            threat = threat_of_row(score.attack, score.role, threats, views, of_model=score.of_model)
        numbers = [] if score.of_model or len(set(rounds)) < 2 else list(dict.fromkeys(rounds))
        for number in (None, *numbers):
            row = _row(score, None if number is None else [each == number for each in rounds])
            row = row.model_copy(update={"bounds": dict(allowed), "threat": threat, "round": number})
            (made if number is None else later).append(row)
    return made + later


def _row(score: RoleScore, mine: list[bool] | None) -> Row:
    assert score.scores is not None
    assert score.kinds is not None
    chosen = slice(None) if mine is None else torch.tensor(mine)
    found = told(score.scores[chosen].numpy(), score.kinds[chosen].numpy())
    corners = np.unique(np.geomspace(1, len(found.curve[0]), MOST_CORNERS).round().astype(int)) - 1
    alarms, members = ([float(side[corner]) for corner in corners] for side in found.curve)
    return Row(
        attack=score.attack,
        role=score.role,
        question="member",
        metrics={name: estimate(each) for name, each in found.metrics.items()},
        values=found.values,
        of_model=score.of_model,
        curve=Roc(false_alarms=alarms, found=members, others=found.others),
    )
