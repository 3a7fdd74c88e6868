"""The client app of `fedveil federate`: a task's local round, computed by the same code as in the embedded engine."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedveil.clients.engine import Tensors
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.defenses.guarantee import exposure_of
from fedveil.errors import FedveilError
from fedveil.federation.capture import Truth
from fedveil.federation.local import Chunk, train_chunk
from fedveil.federation.plan import Moment, Plan
from fedveil.federation.prepare import prepare
from fedveil.federation.steps import Group, Prepared, own_row
from fedveil.flower.memory import Memory
from fedveil.flower.outgoing import Sender, answered, protected_content, without_numbers
from fedveil.flower.records import PARTITION, the_arrays, to_record, to_tensors
from fedveil.flower.roster import introduce
from fedveil.flower.rules import NUM_EXAMPLES, Rules
from fedveil.flower.task_settings import SEEDED_NOISE, TRUTHS, TaskRun
from fedveil.streams import Streams
from fedveil.tree import Tree

log = logging.getLogger(__name__)
WHO = "fedveil"


@lru_cache(maxsize=4)
def prepared_for(told: str, data: str | None) -> Prepared:
    """The task of a run with what it is computed by; a process that plays several clients reads it once.

    data: a site's own, in place of its share of the run's.
    """
    run = TaskRun.model_validate_json(told)
    made = run.build(clients=1, data=data) if data else run.build()
    return prepare(Plan(made, run.chain, run.federation, run.seed), backend="loop")


def _prepared(run: TaskRun, data: str | None) -> Prepared:
    try:
        return prepared_for(run.told(), data)
    except FedveilError as error:
        if os.environ.get(SEEDED_NOISE) == "1":  # a simulation: the server and its user are on this machine too
            raise FedveilError(str(error)) from None
        log.warning("%s", error)  # it may name a path or quote a line of the data
        raise FedveilError(
            "the data or the model of the run cannot be had here: the client's own log says why"
        ) from None


class Site:
    """One client of a run."""

    def __init__(self, context: Context) -> None:
        self.run = TaskRun.of_run(context.run_config)
        own = context.node_config.get("data")
        self.number = int(context.node_config.get(PARTITION, 0))
        self.row = 0 if own else self.number  # whose data
        seeded = self.run.noise == "seeded"
        if seeded and os.environ.get(SEEDED_NOISE) != "1":
            raise FedveilError("the run asks for noise from a seed, which its server could remove: use noise=secure")
        if seeded and own:
            raise FedveilError("the run asks for noise from a seed, which is for simulations, not for data of a site")
        prepared = _prepared(self.run, str(own) if own else None)
        if not 0 <= self.row < len(prepared.plan.task.clients):
            raise FedveilError(f"partition {self.row} is none of the run's {len(prepared.plan.task.clients)} clients")
        if not seeded:  # the order of batches and their choice are nobody else's business either
            prepared = replace(prepared, plan=replace(prepared.plan, seed=secrets.randbits(256)), secure=True)
        self.prepared, self.seeded = prepared, seeded

    @property
    def plan(self) -> Plan:
        """What is learned, and how."""
        return self.prepared.plan

    @property
    def examples(self) -> int:
        """How many the client has."""
        return len(self.plan.task.clients[self.row])

    def rules(self) -> Rules:
        """What may leave."""
        shares: Literal["share", "withhold"] = "share" if self.plan.task.buffers == "shared" else "withhold"
        buffers = tuple(name for name, _ in self.plan.task.model.named_buffers())
        return Rules(chain=self.plan.chain, of=self.run.federation.message, buffers=shares, buffer_names=buffers)

    def parts(self, message: Message) -> tuple[Tensors, Tensors]:
        """The server's weights and buffers."""
        arrays = to_tensors(the_arrays(message.content, "the server's message")[1])
        names = [name for name, p in self.plan.task.model.named_parameters() if p.requires_grad]
        others = [name for name, _ in self.plan.task.model.named_buffers()]
        if set(names) | set(others) != arrays.keys():
            raise FedveilError("the server's model is not the one of this run's settings")
        return {name: arrays[name] for name in names}, {name: arrays[name] for name in others}

    def truth(self, truth: Truth, number: int) -> None:
        """Leave what was behind an update beside the captures of a simulation."""
        folder = os.environ.get(TRUTHS)
        if folder and self.seeded and number in self.run.federation.record_rounds:
            truth.save(Path(folder) / f"round-{number:04}-client-{self.number:04}.safetensors")


app = ClientApp()
introduce(app)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A client's part of a round; what fails becomes an error without details."""

    def answer() -> Message:
        site = Site(context)
        states = _states(site, context, message)
        update, steps = (_gradient if site.run.sends_gradients else _trained)(site, message, states)
        chain = site.plan.chain
        sender = Sender(
            site.number,
            context.state,
            Streams.secure([site.number]),
            seeded=site.seeded,
            local_steps=steps,
            example_rate=min(1.0, site.plan.settings.batch_size / site.examples),
            whole=states.gather([site.row], chain),
        )
        reply = RecordDict({"arrays": to_record(update), "metrics": MetricRecord({NUM_EXAMPLES: site.examples})})
        return Message(protected_content(site.rules(), message.content, reply, "train", sender), reply_to=message)

    return answered(message, answer, WHO)


def _states(site: Site, context: Context, message: Message) -> ClientStates:
    """What the client's defenses remember over rounds."""
    weights, _ = site.parts(message)
    exposure = exposure_of(weights, seeded=site.seeded, bare_buffers=site.rules().buffers == "share")
    memory = Memory.load(context.state, site.plan.chain, weights, exposure)
    states = ClientStates()
    if any(memory.states):
        states.scatter([site.row], memory.states)
    return states


def _number(message: Message) -> int:
    for record in message.content.config_records.values():
        if "server-round" in record:
            return int(str(record["server-round"]))
    raise FedveilError("the server's message does not tell the number of its round")


def _trained(site: Site, message: Message, states: ClientStates) -> tuple[Tensors, int]:
    """FedAvg: the local epochs and the protected upload."""
    weights, buffers = site.parts(message)
    number = _number(message)
    keep = frozenset({site.row}) if os.environ.get(TRUTHS) else frozenset()
    chunk = Chunk([site.row], number, weights, Tree.expand(buffers, 1), states, keep=keep)
    trained = train_chunk(site.prepared, chunk)
    if trained.tally.refused:
        raise FedveilError(without_numbers(trained.tally.refused[site.row]))
    if keep and trained.data[site.row].targets:
        site.truth(trained.data[site.row].truth(), number)
    sent = trained.upload.row(0)
    if site.run.federation.upload == "delta":
        sent = {name: weights[name] + change for name, change in sent.items()}
    return {**sent, **own_row(trained.buffers, 0)}, len(site.plan.walks(1, [site.row])[site.row])


def _gradient(site: Site, message: Message, states: ClientStates) -> tuple[Tensors, int]:
    """FedSGD: the mean of the protected gradients of the client's next batches, at the server's weights."""
    plan, prepared, each = site.plan, site.prepared, site.run.flower.batches_per_message
    weights, buffers = site.parts(message)
    chain: Chain = plan.chain
    memory = states.gather([site.row], chain)
    moved, total, batch = Tree.expand(buffers, 1), None, None
    per_epoch = -(-site.examples // plan.settings.batch_size)
    first = (_number(message) - 1) * each
    for place in range(first, first + each):
        moment = Moment(place // per_epoch + 1, place % per_epoch)
        default = plan.walks(moment.round, [site.row])[site.row][moment.step]  # type: ignore[index]
        indices = plan.compose(site.row, default, moment)
        group = Group(
            [site.row],
            Tree.expand(weights, 1),
            moved,
            prepared.read(plan.task.train, [indices]),
            [plan.planned(default, moment.round)],
        )
        batch = prepared.batch(group, moment)
        result = chain.step(batch, memory)
        moved, total = Tree(result.buffers), result.update if total is None else total + result.update
        if each == 1 and len(indices):
            inputs, targets = group.data
            site.truth(Truth(inputs[0], targets[0], result.seen[0]), _number(message))  # type: ignore[index]
    assert total is not None
    assert batch is not None
    sent = chain.upload(total / each, batch, memory)
    states.scatter([site.row], memory)
    return {**sent.row(0), **own_row(moved, 0)}, each


def _threads() -> None:
    """Several clients share a machine in a simulation; each computes alone."""
    if os.environ.get(SEEDED_NOISE) == "1":
        torch.set_num_threads(1)


_threads()
