"""What an attack may learn from before it sees a victim."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedveil.attacks.scene import Public
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.streams import Streams
from fedveil.tasks.examples import Examples


@dataclass(frozen=True, eq=False)
class Lab:
    """Public facts, auxiliary data and a defense to try things on. No victim is in here, nor anything of one."""

    public: Public
    model: Updates  # one row: the global model of the attacked round, and what a message of the run looks like
    auxiliary: Examples | None  # disjoint from the clients' data, the victims and what these are told from
    streams: Streams  # one stream
    chain: Chain = field(default_factory=Chain)  # what the attacker knows of the defense: maybe nothing
