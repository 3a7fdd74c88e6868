"""How a candidate is held against an update under a chain of defenses: what to replay, and how to compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedveil.defenses.base import Defense, Knowledge, StepsBefore, SummedStep, has_density, owns_step
from fedveil.defenses.chain import Chain
from fedveil.defenses.densities import squared_distance, summed
from fedveil.defenses.updates import Updates
from fedveil.tree import Tree

Rule = Literal["density", "distance", "cosine", "informed"]
_TINY = 1e-300


@dataclass(frozen=True)
class Reading:
    """How an attacker who knows a chain reads an update.

    A chain is replayed up to its last random mechanism, whose density then tells how likely the update is. Without any
    random mechanism the whole chain is replayed, and the right candidate's update is the observed one.
    """

    rule: Rule
    replayed: Chain = field(default_factory=Chain)  # what a candidate is put through
    judge: Defense | None = None  # the last random mechanism, where its density compares
    histories: tuple[StepsBefore | None, ...] = (None,)  # what may have come before each gradient: the best one counts
    of_step: bool = False  # compare the gradient of the only local step, not the message that it led to
    exact: bool = False  # whether the scores are log-likelihoods by the law of the chain

    @property
    def bare(self) -> bool:
        """Whether the replayed chain ends with a step that is released with noise: its judge adds that."""
        return isinstance(self.judge, SummedStep)


def reading(chain: Chain, updates: Updates) -> Reading:
    """How to read updates of a kind, for one who knows the chain behind them; an empty one is known by nobody.

    "density": by the law of the last random mechanism, if nothing that acts behind it changes what it sent.
    "distance": nothing is random.
    "cosine": what is random comes before the gradient. It is replayed with other random numbers, so the outcome is near
    what was sent, not equal to it.
    "informed": nothing better is known than what `Chain.knowledge` makes of the update.
    """
    acting = _in_running_order(chain)
    random = [place for place, defense in enumerate(acting) if _unknown(defense)]
    # The order of the examples is not known: where it matters, a replay is not what happened.
    ordered = updates.steps == updates.local_epochs
    if not acting:
        return Reading("cosine")
    if not random:
        return Reading("distance", Chain(acting), exact=ordered)
    last, behind = acting[random[-1]], acting[random[-1] + 1 :]
    histories = _histories(acting, updates)
    if not _on_update(last):
        return Reading("cosine", _replayable(acting), histories=histories)
    of_step = updates.kind != "gradient" and last.acts_at != "upload"
    if has_density(last) and not behind and (not of_step or updates.steps == 1):
        end = random[-1] + isinstance(last, SummedStep)  # that one's sum is taken, and its noise left out
        known = ordered and len(random) == 1
        return Reading("density", _replayable(acting[:end]), last, histories, of_step, exact=known)
    return informed_reading(chain, updates)


def informed_reading(chain: Chain, updates: Updates) -> Reading:
    """By what `Chain.knowledge` makes of the update: an estimate of the gradient before it was protected."""
    acting = _in_running_order(chain)
    data = tuple(defense for defense in acting if not _on_update(defense))
    return Reading("informed", _replayable(data), histories=_histories(acting, updates))


def _replayable(defenses: tuple[Defense, ...]) -> Chain:
    return Chain(tuple(defense for defense in defenses if not _needs_validation(defense)))


def _histories(acting: tuple[Defense, ...], updates: Updates) -> tuple[StepsBefore | None, ...]:
    hidden = [defense for defense in acting if _needs_validation(defense)]
    return (hidden[0].knowledge(updates.gradient, updates.facts).before or (None,)) if hidden else (None,)


def _in_running_order(chain: Chain) -> tuple[Defense, ...]:
    """The defenses that change what a client sends of given examples, in the order in which they do."""

    def when(defense: Defense) -> int:
        return 1 if owns_step(defense) else {"data": 0, "gradient": 2, "upload": 3}[defense.acts_at]

    acting = [each for each in chain.defenses if each.acts_at not in ("sample", "server") and _acts(each)]
    return tuple(sorted(acting, key=when))  # stable


def _acts(defense: Defense) -> bool:
    own = type(defense)
    return own.perturb is not Defense.perturb or own.protect is not Defense.protect or owns_step(defense)


def _needs_validation(defense: Defense) -> bool:
    """Whether a defense owns the step and looks at data that no attacker has: it is not replayed.

    What it may have done before its gradient was taken is in `Knowledge.before`.
    """
    return owns_step(defense) and "validation" in defense.needs


def _unknown(defense: Defense) -> bool:
    return defense.random or _needs_validation(defense)


def _on_update(defense: Defense) -> bool:
    """Whether a defense changes an update, and not the data or the model behind it."""
    return isinstance(defense, SummedStep) or (defense.acts_at != "data" and not owns_step(defense))


# ---- comparing -------------------------------------------------------------------------------------------


def similarity(known: Knowledge, made: Tree) -> Tensor:
    """The weighted cosine of each candidate's update to the one that is known: shape (K,)."""
    weighted = known.target.combine(known.weight, torch.mul)
    dot = summed(weighted, made, lambda pair: pair.sent * pair.given)
    ours = summed(known.weight, made, lambda pair: pair.sent * pair.given.square())
    theirs = summed(weighted, known.target, lambda pair: pair.sent * pair.given)
    return dot / (ours * theirs).sqrt().clamp_min(_TINY)


def closeness(observed: Tree, made: Tree) -> Tensor:
    """Minus the squared distance of each candidate's update to the observed one, over its square: shape (K,)."""
    return -squared_distance(observed, made) / squared_distance(observed, observed * 0.0).clamp_min(_TINY)


def step_gradient(updates: Updates) -> Tree:
    """The gradient that the only local step of each update was made with, out of the message."""
    lr, decay = updates.lr[0], updates.weight_decay

    def taken_back(message: Tensor, before: Tensor) -> Tensor:
        change = message - before if updates.kind == "weights" else message
        gradient = -change / lr - decay * before
        # What is smaller was lost in the weights: zeros must stay zeros, for mechanisms that send them.
        lost = 4 * torch.finfo(message.dtype).eps * before.abs() * (1 / lr + decay)
        return torch.where(gradient.abs() <= lost, 0.0, gradient)

    return updates.message.combine(updates.before, taken_back)
