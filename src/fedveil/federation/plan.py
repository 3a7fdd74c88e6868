"""`Plan`: what is learned, from whom and by which protocol. A run's result follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.schedule import batches, epoch_orders
from fedveil.federation.settings import FederationSettings
from fedveil.streams import Streams
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.tasks.task import Task

Walks = dict[int, list[Tensor]]  # each client's batches in their order, as indices of examples


@dataclass(frozen=True)
class Moment:
    """When in a run something happens. Rounds count from 1, steps from 0."""

    round: int
    step: int | Literal["upload", "own models"]

    @property
    def path(self) -> tuple[int | str, ...]:
        """Where the clients' streams branch off."""
        return ("round", self.round, *(("step", self.step) if isinstance(self.step, int) else (self.step,)))

    def __str__(self) -> str:
        return f"in round {self.round}, " + (f"step {self.step}" if isinstance(self.step, int) else f"the {self.step}")


@dataclass(frozen=True, eq=False)
class Plan:
    """The facts of a run; `Prepared` adds what it is carried out with."""

    task: Task
    chain: Chain
    settings: FederationSettings
    seed: int = 0
    fixed_sizes: bool = False  # a probe: batches keep the size that was asked for
    view: int = 0  # a probe: which of several messages about the same batches; each draws anew

    def check(self) -> None:
        """Refuse what cannot work, before any long work starts."""
        self.chain.check_message(self.settings.message)
        self.chain.check_parameters({n: p for n, p in self.task.model.named_parameters() if p.requires_grad})
        judged = self.task.classes is not None or self.task.target.kind in ("labels", "numbers")
        if self.settings.patience is not None and (self.task.validation is None or not judged):
            missing = "a task with classes, labels or numbers to predict" if self.task.validation else "validation data"
            raise FedveilError(f"early stopping (patience) needs {missing}")
        if self.task.buffers == "recalibrated" and self.task.validation is None:
            raise FedveilError("recalibrated buffers need validation data: choose another split, or buffers='shared'")
        if self.needs_validation and not self.validation_size:
            raise FedveilError(
                f"{self.chain} needs validation data of each client's own: {len(self.task.clients)} clients need at "
                "least as many validation examples; choose another split"
            )

    # ---- the defense -----------------------------------------------------------------------------------

    def under(self, chain: Chain) -> Plan:
        """The same with other defenses."""
        return replace(self, chain=chain)

    def chain_at(self, number: int) -> Chain:
        """The defenses of a round: none in the warm-up."""
        return Chain() if number <= self.settings.warmup_rounds else self.chain

    @property
    def needs_validation(self) -> bool:
        """Whether a defense looks at validation data of the client's own."""
        return any("validation" in defense.needs for defense in self.chain.defenses)

    @property
    def validation_size(self) -> int:
        """How many validation examples of its own a client has for its defenses."""
        part = self.task.validation
        if part is None:
            return 0
        asked = [defense.validation_examples for defense in self.chain.defenses if "validation" in defense.needs]
        return min(len(part) // len(self.task.clients), max(asked, default=0))

    # ---- the clients and their batches -----------------------------------------------------------------

    def weights(self, clients: Sequence[int]) -> Tensor:
        """What each client counts for in the mean."""
        if self.settings.weighting == "uniform":
            return torch.ones(len(clients), dtype=torch.float64)
        return torch.tensor([len(self.task.clients[client]) for client in clients], dtype=torch.float64)

    def recorded(self, number: int, clients: Sequence[int]) -> frozenset[int]:
        """Those of a round's clients whose updates are captured."""
        asked = number in self.settings.record_rounds
        return frozenset(clients[: self.settings.record_clients] if asked else ())

    def walks(self, number: int, clients: Sequence[int]) -> Walks:
        """The batches of these clients in a round, over all local epochs."""
        found = {}
        for client in clients:
            own = self.task.clients[client]
            orders = epoch_orders(self.seed, client, number, len(own), self.settings.local_epochs)
            found[client] = [batch for order in orders for batch in batches(own[order], self.settings.batch_size)]
        return found

    def compose(self, client: int, default: Tensor, moment: Moment) -> Tensor:
        """The indices of a client's batch: the next ones of its order, or what a sampling defense chooses."""
        chain = self.chain_at(moment.round)
        if not (chain.composes or (chain.random_sizes and not self.fixed_sizes)):
            return default
        own = self.task.clients[client]
        streams = Streams.seeded(self.seed, [client], *moment.path)
        size = self.planned(default, moment.round)
        chosen = chain.sample(self.task.train.labels[own], size, streams, fixed_size=self.fixed_sizes)
        return default if chosen is None else own[chosen.flatten()]

    def planned(self, default: Tensor, number: int) -> int:
        """The size that a batch of a round has by plan.

        Where a defense draws random sizes it is the same in every step, also in the last of an epoch, which else would
        hold what is left: the chance of an example is then the one that the ledger counts with, and the number that
        sums are divided by does not tell how many examples a client has.
        """
        random = self.chain_at(number).random_sizes and not self.fixed_sizes
        return self.settings.batch_size if random else len(default)

    # ---- what is public --------------------------------------------------------------------------------

    def facts(self, number: int) -> dict[str, Any]:
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
            "defense": str(self.chain_at(number)),
            "local_epochs": self.settings.local_epochs,
            "weight_decay": self.settings.weight_decay,
            "buffers": self.task.buffers,
        }

    @property
    def _public_model(self) -> str:
        """The model by name; where it came out of a Python file, without the folder on this machine."""
        name = str(self.task.description.get("model", self.task.model_name))
        return Reference.read(name).short if is_reference(name) else name
