"""The second stage: what the server sees of the attacked rounds, and what is behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil.auditing.candidates import Originals, single
from fedveil.auditing.keys import content_key, described_chain, of_tensors
from fedveil.auditing.store import Entry, Store, Wanted
from fedveil.auditing.training import Trained
from fedveil.auditing.workshop import Workshop
from fedveil.clients.engine import Tensors
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import configuration
from fedveil.federation.probe import Victims, probe
from fedveil.tasks.models.transformer import nearest_tokens
from fedveil.tensorfile import grouped, prefixed
from fedveil.tree import Tree


@dataclass(frozen=True, eq=False)
class Observed:
    """What the victims of one round share, with the defense and without, and what only they know."""

    round: int
    defended: Updates
    undefended: Updates
    inputs: Tensor  # (V, B, ...), in single precision, in which they are judged whatever the model's own type is
    labels: Tensor  # (V, B, ...)
    seen: Tensor  # (V, B, ...): what the gradient was taken at
    views: tuple[Updates, ...] = ()  # further messages about the same batches, with the defense

    @property
    def originals(self) -> Originals:
        """What only the victims know."""
        return Originals(self.inputs, self.labels, self.seen, self.round)


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
        seen = single(truth.seen) if shop.task.text is None else nearest_tokens(shop.task.model, params, truth.seen)
        return Observed(number, made.defended, made.undefended, single(truth.inputs), truth.targets, seen)

    about = f"{shop.case.name}, round {number}, {settings.victims} updates under {shop.chain}"
    first = shop.store.keep("observe", Wanted(key, about), _Form(), make)
    if settings.views == 1 or not plan.chain_at(number).defenses:
        return first

    def again(folder: Path | None) -> tuple[Updates, ...]:
        views = range(1, settings.views)
        return tuple(probe(prepared, params, buffers, number, victims, view=view).defended for view in views)

    wanted = Wanted(content_key("observe", first=key, views=settings.views), f"{about}, {settings.views} messages each")
    return replace(first, views=shop.store.keep("observe", wanted, _ViewsForm(first.defended), again))


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


def kept_observation(store: Store, key: str) -> Observed | None:
    """What was observed under a key, if it is still kept."""
    return store.found("observe", key, _Form())


class _ViewsForm:
    """Further messages as an entry of the store: all but the messages themselves is as in the first."""

    def __init__(self, first: Updates) -> None:
        self._first = first

    def to_entry(self, result: tuple[Updates, ...], folder: Path) -> Entry:
        """The messages."""
        tensors: dict[str, Tensor] = {}
        for place, view in enumerate(result):
            tensors |= prefixed(f"view {place}", view.message)
        return Entry(tensors, {"views": len(result)})

    def from_entry(self, entry: Entry) -> tuple[Updates, ...]:
        """The same again."""
        groups = grouped(entry.tensors)
        trees = [Tree(groups[f"view {place}"]) for place in range(int(entry.facts["views"]))]
        return tuple(replace(self._first, message=tree) for tree in trees)


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

        inputs, labels, seen = (entry.tensors[name] for name in ("inputs", "labels", "seen"))
        return Observed(facts["round"], updates("defended"), updates("undefended"), inputs, labels, seen)
