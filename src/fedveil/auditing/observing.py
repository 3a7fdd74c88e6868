"""The second stage: what the server sees of the attacked rounds and, apart from it, what is true of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fedveil.attacks.scene import Candidates
from fedveil.auditing.keys import content_key, described_chain, of_tensors
from fedveil.auditing.store import Entry, Wanted
from fedveil.auditing.training import Trained
from fedveil.auditing.workshop import Workshop
from fedveil.clients.engine import Tensors
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import configuration
from fedveil.federation.probe import Victims, probe
from fedveil.federation.tensorfile import grouped, prefixed
from fedveil.leakage.truths import Truths
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tree import Tree

MOST_HELD_OUT = 20_000  # examples that victims' are told from


@dataclass(frozen=True, eq=False)
class Observed:
    """What the victims of one round share, with the defense and without, and what only they know."""

    round: int
    defended: Updates
    undefended: Updates
    inputs: Tensor  # (V, B, ...), in single precision, in which they are judged whatever the model's own type is
    labels: Tensor  # (V, B)
    seen: Tensor  # (V, B, ...): what the gradient was taken at


def reached(shop: Workshop, found: Trained | None) -> tuple[Workshop, list[str]]:
    """The rounds that can be attacked after training, and a line on each that cannot.

    Early stopping may end a run before an attacked round, and a round's recorded update may have been refused. Where
    none of the rounds is left, the model that the run kept is attacked, which the round after its own starts from:
    nothing that was trained is lost.
    """
    wanted = shop.experiment.audit.rounds
    recorded = {1, *found.starts} if found else set(wanted)
    there = [number for number in wanted if number in recorded]
    if found is None or there == list(wanted):
        return shop, []
    last = len(found.run.history)
    ended = f"early stopping ended the training after round {last}"
    lines = [
        f"round {number}: {ended if number > last else 'its recorded update was refused'}"
        for number in wanted
        if number not in recorded
    ]
    if there:
        return shop.with_rounds(there), lines
    after = found.run.chosen_round + 1
    if shop.chain.defenses and after <= shop.experiment.federation.warmup_rounds:
        raise FedveilError(
            f"{ended}, in the warm-up without the defense: no round after it can be attacked; use a greater patience "
            "or fewer warm-up rounds"
        )
    lines.append(f"in place of these, the model that training kept is attacked, which round {after} starts from")
    return shop.with_rounds([after]), lines


def observe(shop: Workshop, number: int, found: Trained | None) -> Observed:
    """What the victims share at the start of a round."""
    prepared, settings = shop.defended, shop.experiment.audit
    params, buffers = _start(shop, number, found)
    plan = prepared.plan
    unrecorded = replace(plan, settings=replace(plan.settings, record_rounds=(), record_clients=None))
    victims = Victims(settings.victims, settings.batch_size, settings.source)
    key = content_key(
        "observe",
        plan=configuration(unrecorded),
        model=of_tensors({**params, **buffers}),
        chain=described_chain(plan.chain),
        victims=[repr(victims), number],
        computed=[prepared.engine.backend, prepared.engine.chunk, str(prepared.device)],
    )

    def make(folder: Path | None) -> Observed:
        made = probe(prepared, params, buffers, number, victims)
        truth = made.truth
        return Observed(
            number, made.defended, made.undefended, _single(truth.inputs), truth.targets, _single(truth.seen)
        )

    about = f"{shop.case.name}, round {number}, {settings.victims} updates under {shop.chain}"
    return shop.store.keep("observe", Wanted(key, about), _Form(), make)


def _start(shop: Workshop, number: int, found: Trained | None) -> tuple[Tensors, Tensors]:
    """The weights and buffers that a round starts from: of the run that is attacked, the one under the defense."""
    model = shop.task.model
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    buffers: Tensors = {name: b.detach() for name, b in model.named_buffers()}
    if number == 1:
        return params, buffers
    assert found is not None
    if number in found.starts:
        params, recorded = found.starts[number]
        return params, recorded or buffers
    assert number == found.run.chosen_round + 1  # see `reached`
    return found.run.params, buffers if shop.task.buffers == "local" else found.run.buffers


class _Form:
    """What was observed as an entry of the store."""

    def to_entry(self, result: Observed, folder: Path) -> Entry:
        """Every tensor; of weights that all victims were sent, one copy."""
        tensors: dict[str, Tensor] = {name: getattr(result, name) for name in ("inputs", "labels", "seen")}
        facts: dict[str, Any] = {"round": result.round}
        for name in ("defended", "undefended"):
            updates: Updates = getattr(result, name)
            tensors |= prefixed(f"{name} message", updates.message)
            for part in ("before", "buffers"):
                tree: Tree = getattr(updates, part)
                tensors |= prefixed(f"{name} {part}", tree.row(0) if tree.repeated else tree)
                facts[f"{name} {part}"] = tree.repeated
            facts[name] = [
                *(updates.kind, updates.lr, updates.batch_sizes),
                *(updates.momentum, updates.weight_decay, updates.local_epochs),
            ]
        return Entry(tensors, facts)

    def from_entry(self, entry: Entry) -> Observed:
        """The same again."""
        groups, facts = grouped(entry.tensors), entry.facts

        def updates(name: str) -> Updates:
            message = Tree(groups[f"{name} message"])
            parts = {}
            for part in ("before", "buffers"):
                own = groups.get(f"{name} {part}", {})
                parts[part] = Tree.expand(own, message.count) if facts[f"{name} {part}"] else Tree(own)
            kind, lr, sizes, *rest = facts[name]
            return Updates(kind, parts["before"], message, parts["buffers"], tuple(lr), tuple(sizes), *rest)

        plain = (entry.tensors[name] for name in ("inputs", "labels", "seen"))
        return Observed(facts["round"], updates("defended"), updates("undefended"), *plain)


# ---- what is true, and what victims are told from ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples that no victim holds: to tell victims' from, and for attackers who have auxiliary data."""

    inputs: Tensor
    labels: Tensor
    auxiliary: Examples | None

    @classmethod
    def of(cls, shop: Workshop) -> HeldOut:
        """The test examples, less those that are victims. Attacks that learn get every second one of them."""
        settings, test = shop.experiment.audit, shop.task.test
        taken = settings.victims * settings.batch_size if settings.source == "test" else 0
        rows = list(range(taken, min(len(test), taken + MOST_HELD_OUT)))
        learns = any("auxiliary" in attack.needs for attack in shop.experiment.attacks)
        mine, theirs = (rows[::2], rows[1::2]) if learns else (rows, [])
        inputs, labels = test.subset(mine).batch(list(range(len(mine))))
        return cls(_single(inputs), labels, test.subset(theirs) if theirs else None)


@dataclass(frozen=True, eq=False)
class Truth:
    """What is true of one round: for scoring only, but for the candidates, which an attacker who links is shown."""

    truths: Truths
    candidates: Candidates


def truth_of(shop: Workshop, observed: Observed, held_out: HeldOut, mean_input: Tensor) -> Truth:
    """What the victims of a round really had, and held-out examples to tell theirs from."""
    flat, labels, count = observed.inputs.flatten(0, 1), observed.labels.flatten(), shop.experiment.audit.candidates
    pool = (held_out.inputs, held_out.labels)
    seed = shop.experiment.seed
    chosen = shop.modality.distractors(flat, labels, pool, count=count, seed=seed)
    distractors = held_out.inputs[chosen]
    places = _places(len(observed.labels), chosen.shape[1] + 1, shop.experiment.seed, observed.round)
    others = (distractors, held_out.labels[chosen])
    truths = Truths(
        originals=observed.inputs,
        labels=observed.labels,
        seen=observed.seen,
        rounds=(observed.round,) * len(observed.labels),
        mean_input=mean_input,
        distractors=distractors,
        place=places,
    )
    return Truth(truths, _candidates(observed, others, places, one_example=shop.one_example))


def _places(victims: int, among: int, seed: int, number: int) -> Tensor:
    """Where each victim's original stands among its candidates: drawn, so that no order gives it away."""
    drawn = Streams.seeded(seed, range(victims), "place of the original", number).uniform(1)[:, 0]
    return (drawn * among).long().clamp_max(among - 1)


def _candidates(observed: Observed, others: tuple[Tensor, Tensor], places: Tensor, *, one_example: bool) -> Candidates:
    """The batches that a link test tells apart: the original, and others made of its distractors.

    one_example: they differ in their first example and the rest is known, as a guarantee for one example supposes.
    """
    victims, size = observed.labels.shape
    found = []
    for original, other in zip((observed.inputs, observed.labels), others, strict=True):
        # (V·B, M, ...) -> (V, M, B, ...)
        batches = other.reshape(victims, size, *other.shape[1:]).transpose(1, 2)
        if one_example:
            rest = original[:, None].expand(-1, batches.shape[1], *original.shape[1:])
            batches = torch.cat([batches[:, :, :1], rest[:, :, 1:]], dim=2)
        whole = torch.cat([original[:, None], batches], dim=1)  # the original first, then swapped to its place
        index = torch.arange(whole.shape[1]).repeat(victims, 1)
        rows = torch.arange(victims)
        index[rows, 0], index[rows, places] = places, index[rows, 0].clone()
        found.append(whole[rows[:, None], index])
    like = next(iter(observed.defended.message.values()))
    return Candidates(found[0].to(like.dtype), found[1])


def _single(inputs: Any) -> Tensor:
    return cast(Tensor, inputs).float()
