"""What an attack may learn from before it sees a victim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedveil.attacks.replay import shared_updates
from fedveil.attacks.scene import Public
from fedveil.defenses.base import mean_tree
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.progress import Report
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples
from fedveil.tasks.inputs import Inputs
from fedveil.tree import Tree


class Training(Protocol):
    """How the federation trains, as far as its server can do the same on other examples."""

    @property
    def examples(self) -> int:
        """How many examples the clients hold all together."""

    def __call__(self, examples: Examples, chain: Chain, number: int) -> tuple[Mapping[str, Tensor], ...]:
        """The weights and buffers that a training on these examples under a chain comes to; each number draws anew."""


@dataclass(frozen=True, eq=False)
class Lab:
    """Public facts, auxiliary data and a defense to try things on. No victim is in here, nor anything of one."""

    public: Public
    model: Updates  # one row: the global model of the attacked round, and what a message of the run looks like
    auxiliary: Examples | None  # disjoint from the clients' data, the victims and what these are told from
    streams: Streams  # one stream
    chain: Chain = field(default_factory=Chain)  # what the attacker knows of the defense: maybe nothing
    report: Report | None = None  # is told (steps done, in all) while an attack learns
    views: int = 1  # messages about each batch that the attacker will see
    training: Training | None = None  # for attacks that learn about the training

    def messages(self, inputs: Inputs, labels: Tensor, streams: Streams) -> Tree:
        """What K clients with these batches, (K, B, ...) and (K, B), would send under the defense.

        Of several messages about each batch, the mean.
        """
        made = shared_updates(self.public, self.model, self.chain, inputs, labels, streams)
        if self.views == 1:
            return made
        each = (streams.fold("view", view) for view in range(1, self.views))
        others = [shared_updates(self.public, self.model, self.chain, inputs, labels, fresh) for fresh in each]
        return mean_tree([made, *others])
