"""What FedSGD, FedAvg and the probe have in common: one step of a group of clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.clients.engine import Backend, Engine, Tensors
from fedveil.defenses.chain import Chain, ClientStates, States
from fedveil.errors import FedveilError
from fedveil.federation.capture import Captured
from fedveil.federation.observers import Observer
from fedveil.federation.plan import Moment, Plan
from fedveil.intake import Intake
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs, leaves, map_inputs
from fedveil.tasks.task import Buffers
from fedveil.tree import Tree, size_in_bytes
from fedveil.workers import Lodged, Workers


@dataclass(frozen=True, eq=False)
class Group:
    """Clients that step together: with equal batch sizes and layouts of memory."""

    clients: list[int]
    params: Tree
    buffers: Tree
    data: tuple[Inputs, Tensor]
    planned: Sequence[int] | None = None  # each client's batch size before a defense drew its own


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan with what it is carried out with: see `prepare`, which checks that it works."""

    plan: Plan
    engine: Engine
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: Backend = "auto"  # as it was asked for
    observers: tuple[Observer, ...] = ()
    workers: Workers | None = None  # processes that train FedAvg's chunks of clients; none: they are trained here
    lodged_task: Lodged | None = None  # where these find the task
    passes: int | None = None  # through the model in a client's step, where they were counted
    secure: bool = False  # a real client: its defenses draw from the operating system's entropy, never from a seed

    def under(self, chain: Chain) -> Prepared:
        """The same with other defenses, which nothing has checked."""
        return replace(self, plan=self.plan.under(chain))

    def read(self, examples: Examples, indices: Sequence[Tensor]) -> tuple[Inputs, Tensor]:
        """Equally many examples of each client, stacked."""
        inputs, targets = examples.batch(torch.cat(list(indices)))
        count, size = len(indices), len(indices[0])

        def stack(tensor: Tensor) -> Tensor:
            return tensor.reshape(count, size, *tensor.shape[1:]).to(self.device)

        return map_inputs(stack, inputs), stack(targets)

    def batch(self, group: Group, moment: Moment) -> ClientBatch:
        """A step of these clients as their defenses see it."""
        plan, engine = self.plan, self.engine
        again = ("view", plan.view) if plan.view else ()
        streams = Streams.seeded(plan.seed, group.clients, *moment.path, *again)
        if self.secure:
            streams = Streams.secure(group.clients)
        batch = ClientBatch(engine, group.params, group.buffers, *group.data, streams)
        if group.planned is not None:
            batch.planned = torch.tensor(group.planned, device=self.device)
        if plan.needs_validation and plan.chain_at(moment.round).defenses and plan.task.validation is not None:
            # The task's validation examples are dealt out in turn: training sees the same data as without the defense.
            total = len(plan.task.clients)
            own = [torch.arange(client % total, total * plan.validation_size, total) for client in group.clients]
            held_out = self.read(plan.task.validation, own)
            batch.validation = ClientBatch(engine, group.params, group.buffers, *held_out, streams.fold("validation"))
        return batch


@dataclass(frozen=True, eq=False)
class Step:
    """What a group of clients yielded in one step, with the data it came from."""

    clients: list[int]
    result: StepResult
    inputs: Inputs
    targets: Tensor
    refused: dict[int, str]  # clients whose update or buffers are not to be taken, and why

    @property
    def taken(self) -> list[int]:
        """The rows of the other clients."""
        return [row for row, client in enumerate(self.clients) if client not in self.refused]


@dataclass
class RoundTally:
    """What a round yielded besides the new model."""

    number: int
    clients: list[int]
    bytes_up: int = 0  # all clients together
    bytes_down: int = 0
    loss: float = 0.0  # summed over examples
    examples: int = 0
    captured: list[Captured] = field(default_factory=list)
    taken: int = 0  # messages that the server took
    refused: dict[int, str] = field(default_factory=dict)  # clients of whom one was not taken, and the first reason
    # Weights before the upload was protected, and buffers, of clients whose models are to be judged.
    trained: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)

    def note_refused(self, refused: Mapping[int, str]) -> None:
        """Add clients with the reasons why something of theirs was not taken."""
        self.refused = {**refused, **self.refused}  # the first reason stays

    def note_traffic(self, exchanges: int, params: Tensors, buffers: Tensors, policy: Buffers) -> None:
        """Add what so many exchanges of the model weigh; the policy says how its buffers travel (see `Task`)."""
        weights, others = size_in_bytes(params.values()), size_in_bytes(buffers.values())
        self.bytes_up += exchanges * (weights + others * (policy == "shared"))
        self.bytes_down += exchanges * (weights + others * (policy != "local"))

    def note_loss(self, step: Step) -> None:
        """Add the losses of a step's clients, each counted by its examples."""
        size, taken = step.targets.shape[1], step.taken
        losses = step.result.loss.double()
        self.loss += float(losses.sum() if len(taken) == len(losses) else losses[taken].sum()) * size
        self.examples += size * len(taken)

    def require_taken(self) -> None:
        """A round without any update that could be taken ends the run."""
        if not self.taken and self.refused:
            raise FedveilError(
                f"no update could be taken in round {self.number}: {self.refused[min(self.refused)]}; "
                "lower the learning rate, or check the data, the loss and the defense"
            )


def group_step(prepared: Prepared, states: ClientStates, group: Group, moment: Moment) -> Step:
    """One step of a group of clients.

    Under FedSGD the gradient is itself the upload, so defenses of the upload act on it too. A client whose update or
    buffers are refused remembers nothing of the step.
    """
    chain = prepared.plan.chain_at(moment.round)
    batch = prepared.batch(group, moment)
    memory = states.gather(group.clients, chain)
    try:
        result = chain.step(batch, memory)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        size = len(group.data[1][0])
        raise FedveilError(
            f"batch norm cannot train on the batch of {size} that client {group.clients[0]} has {moment}: choose a "
            "batch_size that leaves no such remainder, or a model without batch norm"
        ) from None
    if prepared.plan.settings.protocol == "fedsgd":
        result = replace(result, update=chain.upload(result.update, batch, memory))
    broken = refusals(group.clients, result.buffers, group.buffers, f"in its buffers {moment}")
    refused = broken | refusals(group.clients, result.update, group.params, str(moment))
    keep_memory(states, group.clients, memory, refused)
    return Step(group.clients, result, *group.data, refused)


def refusals(clients: Sequence[int], messages: Tree, like: Tree, where: str) -> dict[int, str]:
    """The clients whose messages are not to be taken, with a line on each that names it."""
    if not like.count or not clients:
        return {}  # a model without such tensors
    found = Intake(like.row(0)).refused(messages)
    return {clients[row]: f"the update of client {clients[row]} {why} {where}" for row, why in found.items()}


def keep_memory(states: ClientStates, clients: Sequence[int], memory: States, refused: Collection[int]) -> None:
    """Keep what clients remember of a step. Those who were refused stay as they were: it may be as broken."""
    rows = [row for row, client in enumerate(clients) if client not in refused]
    if len(rows) < len(clients):
        memory = [{name: tensor[rows] for name, tensor in state.items()} for state in memory]
    states.scatter([clients[row] for row in rows], memory)


def equal_groups(
    clients: Sequence[int], indices: Mapping[int, Tensor], states: ClientStates
) -> list[tuple[list[int], list[int]]]:
    """The clients whose batches and memories can be stacked, as (positions in `clients`, clients)."""
    groups: dict[object, tuple[list[int], list[int]]] = {}
    for position, client in enumerate(clients):
        positions, members = groups.setdefault((len(indices[client]), states.layout(client)), ([], []))
        positions.append(position)
        members.append(client)
    return list(groups.values())


def in_order(positions: Sequence[Sequence[int]], trees: Sequence[Tree]) -> Tree:
    """The rows of several groups back in the order of their positions, so that sums do not depend on the groups."""
    if len(trees) == 1:
        return trees[0]
    order = torch.tensor([position for group in positions for position in group]).argsort()
    return Tree.concat(trees).rows(order)


def put_rows(tree: Tree, positions: Sequence[int], rows: Mapping[str, Tensor]) -> Tree:
    """The tree with other rows at some positions."""
    if len(positions) == tree.count or not len(tree):
        return Tree(rows)
    index = torch.tensor(positions)
    return Tree({name: t.index_copy(0, index.to(t.device), rows[name]) for name, t in tree.items()})


def own_row(tree: Tree, row: int) -> Tensors:
    """One client's tensors as copies, which do not hold the whole stack in memory."""
    return {name: tensor.clone() for name, tensor in tree.row(row).items()}


def join(parts: Sequence[Inputs], how: Callable[[list[Tensor]], Tensor]) -> Inputs:
    """Several inputs made one, part by part, with `torch.cat` or `torch.stack`."""
    named = {name: how([leaves(part)[name] for part in parts]) for name in leaves(parts[0])}
    return named[None] if None in named else {str(name): tensor for name, tensor in named.items()}
