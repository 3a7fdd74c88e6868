"""What a client remembers over the rounds of a run, in the state that Flower keeps for it (`context.state`).

Flower keeps this state with the client and never sends it. It lasts as long as the run (in Flower 1.41: the series of
runs). Memory that a defense has for one round only is never put there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedveil.defenses.chain import Chain, States
from fedveil.defenses.guarantee import Exposure
from fedveil.errors import FedveilError
from fedveil.flower.records import to_record, to_tensors
from fedveil.ledger.ledger import Ledger

FACTS, STATES = "fedveil.memory", "fedveil.states"


@dataclass
class Memory:
    """The defenses' own memory, what was spent, and the form of the model."""

    states: States
    ledger: Ledger
    form: str  # of the weights: names, shapes and types
    sent: int = 0  # replies with an update so far

    @classmethod
    def load(cls, state: RecordDict, chain: Chain, weights: Mapping[str, Tensor], exposure: Exposure) -> Self:
        """What the state holds, or a fresh memory. Another model or defense than before in the same run is refused."""
        memory = cls(chain.new_states(), Ledger(exposure), form_of(weights))
        facts = state.config_records.get(FACTS)
        if facts is None:
            return memory
        if facts["form"] != memory.form:
            raise FedveilError("the server sent a model of another form than before in this run")
        if facts["chain"] != str(chain):
            raise FedveilError(f"this run began under {facts['chain']!s}, and is now to go on under {chain}")
        memory.sent = int(str(facts["sent"]))
        memory.ledger.load_state_dict(json.loads(str(facts["ledger"])), known=[chain])
        for name, tensor in to_tensors(state.array_records.get(STATES, {})).items():
            position, _, own = name.partition("/")
            if not re.fullmatch("[0-9]{1,3}", position) or int(position) >= len(memory.states):
                raise FedveilError("what this client remembers of the run is damaged: start another run")
            memory.states[int(position)][own] = tensor
        return memory

    def save(self, state: RecordDict, chain: Chain) -> None:
        """Keep what lasts over rounds."""
        state[FACTS] = ConfigRecord(
            {
                "chain": str(chain),
                "form": self.form,
                "sent": self.sent,
                "ledger": json.dumps(self.ledger.state_dict()),
            }
        )
        lasting = {
            f"{position}/{name}": tensor
            for position, (defense, own) in enumerate(zip(chain.defenses, self.states, strict=True))
            for name, tensor in own.items()
            if defense.state_scope == "run"
        }
        if lasting:
            state[STATES] = to_record(lasting)


def remembered(state: RecordDict) -> dict[str, Any]:
    """The records of earlier rounds, before an app has its hands on them."""
    return {name: state[name] for name in (FACTS, STATES) if name in state}


def put_back(state: RecordDict, memory: Mapping[str, Any]) -> None:
    """What an app threw away, as one does that begins every round with a state of its own."""
    for name, record in memory.items():
        if name not in state:
            state[name] = record


def form_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and types."""
    told = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
