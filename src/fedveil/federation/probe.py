"""What clients would share at a given model: many victims of one round, with the defense and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.federation.capture import Truth
from fedveil.federation.local import Chunk, local_round
from fedveil.federation.plan import Moment, Plan, Walks
from fedveil.federation.schedule import batches, epoch_orders, windows
from fedveil.federation.steps import Group, Prepared, equal_groups, group_step, join
from fedveil.tasks.examples import Examples
from fedveil.tree import Tree


@dataclass(frozen=True)
class Victims:
    """How many victims there are, and whose examples they hold.

    source "clients": victim i is client i mod K with the (i div K)-th batch of its shuffled order of the round. Its
    defense remembers the batches before, all at the same weights. "test": victim i holds the test examples
    i·B to (i+1)·B in their order, and draws as client i.
    """

    count: int
    batch_size: int = 1
    source: Literal["clients", "test"] = "clients"


@dataclass(frozen=True, eq=False)
class Probe:
    """The updates of V victims at one model, and what is true of them. Every tensor's first axis is the victim."""

    defended: Updates
    undefended: Updates  # of the same victims without the defense
    truth: Truth  # under FedAvg, `seen` in the first local epoch


def probe(
    prepared: Prepared, params: Tensors, buffers: Tensors, number: int, victims: Victims, *, view: int = 0
) -> Probe:
    """What victims would share at these weights in this round, drawing as they would in training.

    Under FedAvg a victim's examples are all that it trains on, for `local_epochs` in batches of the federation's
    `batch_size`. In a warm-up round the defense is off, as in training.

    view: another one makes another message about the same batches: all that is drawn is drawn anew, the choice of the
        batches aside, and the defense remembers nothing of the first message.
    """
    if victims.count < 1 or victims.batch_size < 1 or number < 1:
        got = f"{victims.count} victims, batch_size {victims.batch_size}, round {number}"
        raise FedveilError(f"a probe needs at least 1 victim with 1 example, and rounds count from 1: got {got}")
    plan = replace(prepared.plan, fixed_sizes=True, view=view)
    device = next(iter(params.values())).device
    prepared = replace(prepared, plan=plan, device=device, engine=prepared.engine.uncompiled())
    chain = plan.chain_at(number)
    if victims.source == "test" and chain.composes:
        raise FedveilError(f"{chain} composes batches from a client's own data: probe it with source 'clients'")
    waves = _client_waves(plan, number, victims) if victims.source == "clients" else _test_wave(plan, number, victims)
    examples = plan.task.train if victims.source == "clients" else plan.task.test
    defended = _Side(prepared, examples, params, buffers, number)
    undefended = _Side(prepared.under(Chain()), examples, params, buffers, number)
    with_it, without = [], []
    for wave, walks in enumerate(waves):
        for window in windows(list(walks), prepared.engine.chunk):
            composed = {client: _composed(plan, client, walks[client], number, wave) for client in window}
            with_it.append(defended.messages(composed, wave))
            without.append(undefended.messages(composed, wave))
    messages, truths = zip(*with_it, strict=True)
    bare, _ = zip(*without, strict=True)
    sizes = tuple(len(batch) for batch in next(iter(waves[0].values())))
    settings, local = plan.settings, plan.settings.protocol == "fedavg"
    shared = Updates(
        kind=settings.message,
        before=Tree.expand(params, victims.count),
        message=Tree.concat(messages),
        buffers=Tree.expand(buffers, victims.count),
        lr=(settings.lr_at(number),) * len(sizes),
        batch_sizes=sizes,
        momentum=settings.momentum if local else 0.0,
        weight_decay=settings.weight_decay if local else 0.0,
        local_epochs=settings.local_epochs,
    )
    return Probe(shared, replace(shared, message=Tree.concat(bare)), _stacked(truths, torch.cat))


# ---- who the victims are -----------------------------------------------------------------------------------


def _client_waves(plan: Plan, number: int, victims: Victims) -> list[Walks]:
    """The clients' first batches, then their second ones, and so on, until there are enough victims."""
    clients, size = len(plan.task.clients), victims.batch_size
    waves: list[Walks] = [{} for _ in range(-(-victims.count // clients))]
    for victim in range(victims.count):
        wave, client = divmod(victim, clients)
        own = plan.task.clients[client]
        if (wave + 1) * size > len(own):
            enough = sum(len(indices) // size for indices in plan.task.clients)
            raise FedveilError(
                f"client {client} has {len(own)} examples, too few for {wave + 1} batches of {size}: ask for fewer "
                f"victims or smaller batches (all clients together have {enough} such batches)"
            )
        orders = epoch_orders(plan.seed, client, number, len(own), plan.settings.local_epochs)
        members = orders[0][wave * size : (wave + 1) * size]
        # Later epochs visit these examples in the order in which the client's whole epoch would.
        mine = [own[order[torch.isin(order, members)]] for order in orders[1:]]
        waves[wave][client] = _walk(plan, [own[members], *mine])
    return waves


def _test_wave(plan: Plan, number: int, victims: Victims) -> list[Walks]:
    """Consecutive test examples for every victim."""
    count, size = victims.count, victims.batch_size
    if count * size > len(plan.task.test):
        raise FedveilError(
            f"{count} victims with {size} examples each need {count * size} test examples, "
            f"but there are {len(plan.task.test)}"
        )
    wave: Walks = {}
    for victim in range(count):
        own = torch.arange(victim * size, (victim + 1) * size)
        later = epoch_orders(plan.seed, victim, number, size, plan.settings.local_epochs)[1:]
        wave[victim] = _walk(plan, [own, *(own[order] for order in later)])
    return [wave]


def _walk(plan: Plan, epochs: list[Tensor]) -> list[Tensor]:
    """A victim's batches: one gradient of all its examples, or local epochs in the settings' batch size."""
    if plan.settings.protocol == "fedsgd":
        return [epochs[0]]
    return [batch for order in epochs for batch in batches(order, plan.settings.batch_size)]


def _composed(plan: Plan, client: int, walk: list[Tensor], number: int, wave: int) -> list[Tensor]:
    """The batches after a sampling defense chose, if there is one."""
    first = wave if plan.settings.protocol == "fedsgd" else 0
    chosen = [plan.compose(client, indices, Moment(number, first + i)) for i, indices in enumerate(walk)]
    if any(len(got) != len(asked) for got, asked in zip(chosen, walk, strict=True)):
        raise FedveilError(f"{plan.chain} composes batches of unequal sizes: they cannot be probed together")
    return chosen


# ---- what they share ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Side:
    """The victims with the defense, or without it."""

    prepared: Prepared
    examples: Examples
    params: Tensors
    buffers: Tensors
    number: int
    states: ClientStates = field(default_factory=ClientStates)  # under FedSGD: what they remember of earlier waves

    def messages(self, walks: Walks, wave: int) -> tuple[Tree, Truth]:
        """What a few victims send, and what is behind it."""
        return (self._uploads if self.prepared.plan.settings.protocol == "fedavg" else self._gradients)(walks, wave)

    def _uploads(self, walks: Walks, wave: int) -> tuple[Tree, Truth]:
        clients = list(walks)
        buffers = Tree.expand(self.buffers, len(clients))
        # A victim's whole local round: it remembers nothing of another wave's.
        chunk = Chunk(clients, self.number, self.params, buffers, ClientStates(), keep=frozenset(clients))
        trained = local_round(self.prepared, chunk, walks, self.examples)
        _require_taken(trained.tally.refused)
        epoch = len(walks[clients[0]]) // self.prepared.plan.settings.local_epochs
        return trained.upload, _stacked([trained.data[client].truth(epoch) for client in clients], torch.stack)

    def _gradients(self, walks: Walks, wave: int) -> tuple[Tree, Truth]:
        clients, indices = list(walks), {client: walk[0] for client, walk in walks.items()}
        if len(equal_groups(clients, indices, self.states)) > 1:
            chain = self.prepared.plan.chain
            raise FedveilError(f"{chain} keeps memories of unequal shapes: its victims cannot be probed together")
        params, buffers = (Tree.expand(row, len(clients)) for row in (self.params, self.buffers))
        group = Group(clients, params, buffers, self.prepared.read(self.examples, list(indices.values())))
        done = group_step(self.prepared, self.states, group, Moment(self.number, wave))
        _require_taken(done.refused)
        return done.result.update, Truth(done.inputs, done.targets, done.result.seen)


def _stacked(truths: list[Truth] | tuple[Truth, ...], how: Callable[[list[Tensor]], Tensor]) -> Truth:
    """Several victims' truths as one."""
    inputs, seen = join([each.inputs for each in truths], how), join([each.seen for each in truths], how)
    return Truth(inputs, how([each.targets for each in truths]), seen)


def _require_taken(refused: Mapping[int, str]) -> None:
    """There is nothing to attack in an update that no server would take."""
    for line in refused.values():
        raise FedveilError(f"{line}: it cannot be attacked; check the data, the loss and the defense")
