"""The federation's training again, on examples that an attacker has: what reference models come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import configuration
from fedveil.federation.plan import Plan
from fedveil.federation.run import train
from fedveil.federation.steps import Prepared
from fedveil.streams import Streams
from fedveil.tasks.definition import trained_on
from fedveil.tasks.examples import Examples


@dataclass(frozen=True, eq=False)
class ReferenceTraining:
    """Trains as the federation does: the same first weights, protocol, rounds and rates, and as many clients."""

    prepared: Prepared  # of the run without a defense

    @property
    def examples(self) -> int:
        """How many examples the clients hold all together."""
        return sum(map(len, self.prepared.plan.task.clients))

    def described(self) -> dict[str, Any]:
        """All that what is trained depends on, beside the examples, the chain and the number."""
        return configuration(self._plan())

    def __call__(self, examples: Examples, chain: Chain, number: int) -> tuple[Mapping[str, Tensor], ...]:
        """The weights and buffers that a training on these examples under a chain comes to; each number draws anew."""
        plan = self._plan()
        clients = len(plan.task.clients)
        if len(examples) < clients:
            raise FedveilError(f"{len(examples)} auxiliary examples are too few to train as {clients} clients do")
        drawn = int(Streams.seeded(plan.seed, [0], "reference training", number).integers(2**62, 1)[0, 0])
        dealt = [range(client, len(examples), clients) for client in range(clients)]
        own = replace(plan, task=trained_on(plan.task, examples, dealt), chain=chain, seed=drawn)
        run = train(replace(self.prepared, plan=own, observers=(), workers=None, lodged_task=None))
        return run.params, run.buffers

    def _plan(self) -> Plan:
        """All rounds are run, and nothing is recorded; the model is evaluated once."""
        plan = self.prepared.plan
        settings = replace(
            plan.settings,
            patience=None,
            record_rounds=(),
            record_clients=None,
            local_utility=0,
            evaluate_every=plan.settings.rounds,
        )
        return replace(plan, settings=settings)
