"""What clients would share at a given model: many victims of one round, with the defense and without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedveil.clients.engine import Engine, Tensors
from fedveil.defenses.base import Defense, MessageKind, step_weight
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.defenses.updates import as_gradient
from fedveil.errors import FedveilError
from fedveil.federation.local import local_round
from fedveil.federation.schedule import batches, epoch_orders, windows
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Outcome, Plan, equal_groups, group_step, join
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.task import Task
from fedveil.tree import Tree

Walks = dict[int, list[Tensor]]  # each client's batches, as places in the examples


@dataclass(frozen=True, eq=False)
class Probe:
    """The updates of V victims at one model: every tensor's first axis is the victim."""

    kind: MessageKind
    params: Tensors  # the model at which all this was shared
    buffers_before: Tensors
    defended: Tree  # gradients; under FedAvg the pseudo-gradients of the uploads
    undefended: Tree  # the same victims without the defense
    uploads: Tree  # what is sent, defended; under FedSGD the same as `defended`
    undefended_uploads: Tree
    inputs: Inputs  # (V, B, ...), as the model takes them
    targets: Tensor  # (V, B)
    seen: Inputs  # (V, B, ...): what the gradient was taken at; under FedAvg in the first local epoch
    buffers: Tree  # as the defended step left them
    clients: tuple[int, ...]  # whose streams each victim drew from
    lr: tuple[float, ...]  # of each local step
    momentum: float
    batch_sizes: tuple[int, ...]  # of each local step

    @property
    def steps(self) -> int:
        """Local steps behind one update."""
        return len(self.lr)


@dataclass(frozen=True, eq=False)
class _Part:
    """A few victims' answers with one chain."""

    update: Tree
    buffers: Tree
    inputs: Inputs
    targets: Tensor
    seen: Inputs


def probe(
    task: Task,
    defense: Defense | Chain | Sequence[Defense] | str | None,
    settings: FederationSettings,
    *,
    params: Tensors,
    buffers: Tensors,
    round: int,
    victims: int,
    batch_size: int,
    source: Literal["clients", "test"] = "clients",
    seed: int = 0,
    engine: Engine,
) -> Probe:
    """What `victims` clients would share at these weights in this round, drawing as they would in training.

    source "clients": victim i is client i mod K with the (i div K)-th batch of its shuffled order of this round. Its
    defense remembers the batches before, all at the same weights. "test": victim i holds the test examples
    i·B to (i+1)·B in their order, and draws as client i.

    Under FedAvg those B examples are all that a victim trains on, for `local_epochs` in batches of
    `settings.batch_size`. In a warm-up round the defense is off, as in training.
    """
    if victims < 1 or batch_size < 1 or round < 1:
        got = f"{victims} victims, batch_size {batch_size}, round {round}"
        raise FedveilError(f"a probe needs at least 1 victim with 1 example, and rounds count from 1: got {got}")
    device = next(iter(params.values())).device
    plan = Plan(task, Chain.of(defense), settings, seed, engine, device, fixed_sizes=True)
    plan.check()
    chain = plan.chain_at(round)
    if source == "test" and chain.composes:
        raise FedveilError(f"{chain} composes batches from a client's own data: probe it with source 'clients'")
    examples = task.train if source == "clients" else task.test
    if source == "clients":
        waves = _client_waves(plan, round, victims, batch_size)
    else:
        waves = [_test_wave(plan, round, victims, batch_size)]
    memory, bare = ClientStates(), ClientStates()
    defended, undefended, order = [], [], []
    for number, wave in enumerate(waves):
        for window in windows(list(wave), engine.chunk):
            walks = {client: wave[client] for client in window}
            composed = {c: _composed(plan, chain, c, walk, round, number) for c, walk in walks.items()}
            if any(len(got) != len(b) for c in window for got, b in zip(composed[c], walks[c], strict=True)):
                raise FedveilError(f"{chain} composes batches of unequal sizes: they cannot be probed together")
            given = (plan, examples, params, buffers, round, number)
            defended.append(_answers(chain, memory, walks, composed, *given))
            undefended.append(_answers(Chain(), bare, composed, composed, *given))
            order += window
    sizes = tuple(len(batch) for batch in next(iter(waves[0].values())))
    lr = (settings.lr_at(round),) * len(sizes)
    momentum = settings.momentum if settings.protocol == "fedavg" else 0.0
    uploads = Tree.concat([part.update for part in defended])
    plain = Tree.concat([part.update for part in undefended])
    before = Tree.expand(params, victims)
    return Probe(
        kind=settings.message,
        params=params,
        buffers_before=buffers,
        defended=as_gradient(settings.message, uploads, before, step_weight(lr, momentum)),
        undefended=as_gradient(settings.message, plain, before, step_weight(lr, momentum)),
        uploads=uploads,
        undefended_uploads=plain,
        inputs=join([part.inputs for part in defended], torch.cat),
        targets=torch.cat([part.targets for part in defended]),
        seen=join([part.seen for part in defended], torch.cat),
        buffers=Tree.concat([part.buffers for part in defended]),
        clients=tuple(order),
        lr=lr,
        momentum=momentum,
        batch_sizes=sizes,
    )


# ---- who the victims are -----------------------------------------------------------------------------------


def _client_waves(plan: Plan, number: int, victims: int, size: int) -> list[Walks]:
    """The clients' first batches, then their second ones, and so on, until there are enough victims."""
    clients = len(plan.task.clients)
    waves: list[Walks] = [{} for _ in range(-(-victims // clients))]
    for victim in range(victims):
        wave, client = divmod(victim, clients)
        own = plan.task.clients[client]
        if (wave + 1) * size > len(own):
            enough = sum(len(places) // size for places in plan.task.clients)
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


def _test_wave(plan: Plan, number: int, victims: int, size: int) -> Walks:
    """Consecutive test examples for every victim."""
    if victims * size > len(plan.task.test):
        raise FedveilError(
            f"{victims} victims with {size} examples each need {victims * size} test examples, "
            f"but there are {len(plan.task.test)}"
        )
    wave: Walks = {}
    for victim in range(victims):
        own = torch.arange(victim * size, (victim + 1) * size)
        later = epoch_orders(plan.seed, victim, number, size, plan.settings.local_epochs)[1:]
        wave[victim] = _walk(plan, [own, *(own[order] for order in later)])
    return wave


def _walk(plan: Plan, epochs: list[Tensor]) -> list[Tensor]:
    """A victim's batches: one gradient of all its examples, or local epochs in the settings' batch size."""
    if plan.settings.protocol == "fedsgd":
        return [epochs[0]]
    return [batch for order in epochs for batch in batches(order, plan.settings.batch_size)]


def _composed(plan: Plan, chain: Chain, client: int, walk: list[Tensor], number: int, wave: int) -> list[Tensor]:
    """The batches after a sampling defense chose, if there is one."""
    first = wave if plan.settings.protocol == "fedsgd" else 0
    return [plan.compose(chain, client, places, ("round", number, "step", first + i)) for i, places in enumerate(walk)]


# ---- what they share ---------------------------------------------------------------------------------------


def _answers(
    chain: Chain,
    states: ClientStates,
    walks: Walks,
    composed: Walks,
    plan: Plan,
    examples: Examples,
    params: Tensors,
    buffers: Tensors,
    number: int,
    wave: int,
) -> _Part:
    clients = list(walks)
    own = Tree.expand(buffers, len(clients))
    if plan.settings.protocol == "fedavg":
        fresh = ClientStates()  # a victim's whole local round: it remembers nothing of another wave's
        outcome = Outcome(clients)
        local = local_round(plan, chain, fresh, examples, clients, walks, params, own, number, outcome, keep=clients)
        _require_taken(outcome.refused)
        epoch = len(walks[clients[0]]) // plan.settings.local_epochs
        traces = [local.traces[client] for client in clients]
        return _Part(
            local.upload,
            local.buffers,
            join([join(trace.inputs[:epoch], torch.cat) for trace in traces], torch.stack),
            torch.stack([torch.cat(trace.targets[:epoch]) for trace in traces]),
            join([join(trace.seen[:epoch], torch.cat) for trace in traces], torch.stack),
        )
    places = {client: walk[0] for client, walk in composed.items()}
    groups = equal_groups(clients, places, states)
    if len(groups) > 1:
        raise FedveilError(f"{chain} keeps memories of unequal shapes: its victims cannot be probed together")
    data = plan.read(examples, list(places.values()))
    done = group_step(plan, chain, states, clients, Tree.expand(params, len(clients)), own, data, number, wave)
    _require_taken(done.refused)
    return _Part(done.result.update, done.result.buffers, done.inputs, done.targets, done.result.seen)


def _require_taken(refused: Mapping[int, str]) -> None:
    """There is nothing to attack in an update that no server would take."""
    for line in refused.values():
        raise FedveilError(f"{line}: it cannot be attacked; check the data, the loss and the defense")
