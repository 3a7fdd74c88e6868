"""What FedSGD, FedAvg and the probe have in common: one step of a group of clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.clients.engine import Engine, Tensors
from fedveil.defenses.chain import Chain, ClientStates, States
from fedveil.errors import FedveilError
from fedveil.federation.capture import Captured
from fedveil.federation.observers import Observer
from fedveil.federation.settings import FederationSettings
from fedveil.intake import Intake
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs, leaves, map_inputs
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.tasks.task import Buffers, Task
from fedveil.tree import Tree, size_in_bytes
from fedveil.workers import Lodged, Workers


@dataclass(frozen=True, eq=False)
class Plan:
    """What stays the same over a run."""

    task: Task
    chain: Chain
    settings: FederationSettings
    seed: int
    engine: Engine
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    observers: tuple[Observer, ...] = ()
    fixed_sizes: bool = False  # a probe: batches keep the size that was asked for
    workers: Workers | None = None  # processes that train FedAvg's chunks of clients; none: they are trained here
    lodged_task: Lodged | None = None  # where these find the task

    def check(self) -> None:
        """Refuse what cannot work, before any long work starts."""
        self.chain.check_message(self.settings.message)
        self.chain.check_parameters({n: p for n, p in self.task.model.named_parameters() if p.requires_grad})
        if self.settings.patience is not None and (
            self.task.validation is None or (self.task.classes is None and self.task.labels is None)
        ):
            missing = "validation data" if self.task.validation is None else "a task with classes or labels"
            raise FedveilError(f"early stopping (patience) needs {missing}")
        if self.task.buffers == "recalibrated" and self.task.validation is None:
            raise FedveilError("recalibrated buffers need validation data: choose another split, or buffers='shared'")
        if self.needs_validation and not self._own_validation_size:
            raise FedveilError(
                f"{self.chain} needs validation data of each client's own: {len(self.task.clients)} clients need at "
                "least as many validation examples; choose another split"
            )

    def chain_at(self, number: int) -> Chain:
        """The defenses of a round: none in the warm-up."""
        return Chain() if number <= self.settings.warmup_rounds else self.chain

    def weights(self, clients: Sequence[int]) -> Tensor:
        """What each client counts for in the mean."""
        if self.settings.weighting == "uniform":
            return torch.ones(len(clients), dtype=torch.float64)
        return torch.tensor([len(self.task.clients[client]) for client in clients], dtype=torch.float64)

    def facts(self, chain: Chain) -> dict[str, Any]:
        """The public settings that go into a capture. Never a seed: it would give noise and order away."""
        normalization = self.task.normalization
        loss = self.task.loss
        return {
            "model": self._public_model,
            "loss": getattr(loss, "__name__", type(loss).__name__),
            "shape": list(self.task.shape),
            "classes": self.task.classes,
            "mean": list(normalization.mean) if normalization else None,
            "std": list(normalization.std) if normalization else None,
            "defense": str(chain),
            "local_epochs": self.settings.local_epochs,
            "weight_decay": self.settings.weight_decay,
            "buffers": self.task.buffers,
        }

    @property
    def _public_model(self) -> str:
        """The model by name; where it came out of a Python file, without the folder on this machine."""
        name = str(self.task.description.get("model", self.task.model_name))
        return Reference.read(name).short if is_reference(name) else name

    @property
    def needs_validation(self) -> bool:
        """Whether a defense looks at validation data of the client's own."""
        return any("validation" in defense.needs for defense in self.chain.defenses)

    @property
    def _own_validation_size(self) -> int:
        part = self.task.validation
        if part is None:
            return 0
        asked = [defense.validation_examples for defense in self.chain.defenses if "validation" in defense.needs]
        return min(len(part) // len(self.task.clients), max(asked, default=0))

    def read(self, examples: Examples, places: Sequence[Tensor]) -> tuple[Inputs, Tensor]:
        """Equally many examples of each client, stacked."""
        inputs, targets = examples.batch(torch.cat(list(places)))
        count, size = len(places), len(places[0])

        def stack(tensor: Tensor) -> Tensor:
            return tensor.reshape(count, size, *tensor.shape[1:]).to(self.device)

        return map_inputs(stack, inputs), stack(targets)

    def batch(
        self,
        clients: Sequence[int],
        params: Tree,
        buffers: Tree,
        data: tuple[Inputs, Tensor],
        path: tuple[int | str, ...],
        chain: Chain,
        planned: Sequence[int] | None = None,
    ) -> ClientBatch:
        """The clients' step as their defenses see it."""
        streams = Streams.seeded(self.seed, clients, *path)
        batch = ClientBatch(self.engine, params, buffers, *data, streams)
        if planned is not None:
            batch.planned = torch.tensor(planned, device=self.device)
        if self.needs_validation and chain.defenses and self.task.validation is not None:
            # The task's validation examples are dealt out in turn: training sees the same data as without the defense.
            total = len(self.task.clients)
            own = [torch.arange(client % total, total * self._own_validation_size, total) for client in clients]
            held_out = self.read(self.task.validation, own)
            batch.validation = ClientBatch(self.engine, params, buffers, *held_out, streams.fold("validation"))
        return batch

    def compose(self, chain: Chain, client: int, default: Tensor, path: tuple[int | str, ...]) -> Tensor:
        """The places of a client's batch: the next ones of its order, or what a sampling defense chooses."""
        if not (chain.composes or (chain.random_sizes and not self.fixed_sizes)):
            return default
        own = self.task.clients[client]
        streams = Streams.seeded(self.seed, [client], *path)
        size = self.planned(chain, default)
        chosen = chain.sample(self.task.train.labels[own], size, streams, fixed_size=self.fixed_sizes)
        return default if chosen is None else own[chosen.flatten()]

    def planned(self, chain: Chain, default: Tensor) -> int:
        """The size that a batch has by plan.

        Where a defense draws random sizes it is the same in every step, also in the last of an epoch, which else would
        hold what is left: the chance of an example is then the one that the ledger counts with, and the number that
        sums are divided by does not tell how many examples a client has.
        """
        return self.settings.batch_size if chain.random_sizes and not self.fixed_sizes else len(default)


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
class Outcome:
    """What a round yielded besides the new model."""

    clients: list[int]
    bytes_up: int = 0  # all clients together
    bytes_down: int = 0
    loss: float = 0.0  # summed over examples
    examples: int = 0
    captured: list[Captured] = field(default_factory=list)
    taken: int = 0  # messages that the server took
    refused: dict[int, str] = field(default_factory=dict)  # clients of whom one was not taken, and the first reason

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


def group_step(
    plan: Plan,
    chain: Chain,
    states: ClientStates,
    clients: list[int],
    params: Tree,
    buffers: Tree,
    data: tuple[Inputs, Tensor],
    number: int,
    step: int,
    planned: Sequence[int] | None = None,
) -> Step:
    """One step of clients with equal batch sizes and layouts of memory.

    Under FedSGD the gradient is itself the upload, so defenses of the upload act on it too. `planned`: each client's
    batch size before a defense drew its own. A client whose update or buffers are refused remembers nothing of the
    step.
    """
    batch = plan.batch(clients, params, buffers, data, ("round", number, "step", step), chain, planned)
    memory = states.gather(clients, chain)
    try:
        shared = chain.step(batch, memory)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        size = len(data[1][0])
        raise FedveilError(
            f"batch norm cannot train on the batch of {size} that client {clients[0]} has in round {number}, step "
            f"{step}: choose a batch_size that leaves no such remainder, or a model without batch norm"
        ) from None
    if plan.settings.protocol == "fedsgd":
        update = chain.upload(shared.update, batch, memory)
        shared = StepResult(update, shared.buffers, shared.loss, shared.seen)
    where = f"in round {number}, step {step}"
    broken = refusals(clients, shared.buffers, buffers, f"in its buffers {where}")
    refused = broken | refusals(clients, shared.update, params, where)
    keep_memory(states, clients, memory, refused)
    return Step(clients, shared, *data, refused)


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


def require_taken(outcome: Outcome, number: int) -> None:
    """A round without any update that could be taken ends the run."""
    if not outcome.taken and outcome.refused:
        raise FedveilError(
            f"no update could be taken in round {number}: {outcome.refused[min(outcome.refused)]}; "
            "lower the learning rate, or check the data, the loss and the defense"
        )


def equal_groups(
    clients: Sequence[int], places: Mapping[int, Tensor], states: ClientStates
) -> list[tuple[list[int], list[int]]]:
    """The clients whose batches and memories can be stacked, as (positions in `clients`, clients)."""
    groups: dict[object, tuple[list[int], list[int]]] = {}
    for position, client in enumerate(clients):
        positions, members = groups.setdefault((len(places[client]), states.layout(client)), ([], []))
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
