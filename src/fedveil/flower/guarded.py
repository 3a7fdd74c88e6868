"""Guard inside a client's own training function: for defenses of the data and of the gradients of local steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, RecordDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fedveil.clients.engine import Loss
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.defenses.poisson import poisson_loader
from fedveil.errors import FedveilError
from fedveil.flower.records import PARTITION, to_record, to_tensors
from fedveil.guard.guard import Guard
from fedveil.tasks.inputs import Inputs

NOTE, STATE, KEPT = "fedveil.guarded", "fedveil.guard", "fedveil.guard.states"


class Local(NamedTuple):
    """What protected the training behind a reply."""

    chain: Chain
    steps: int
    example_rate: float = 1.0


@contextmanager
def guarded(
    model: nn.Module,
    loss: Loss,
    context: Context,
    defense: Defense | Chain | str | None = None,
    *,
    batch_size: int | None = None,
    dataset_size: int | None = None,
    validation: tuple[Inputs, Tensor] | None = None,
    perturb: str | None = None,
    seed: int | None = None,
) -> Iterator[Guard]:
    """A `Guard` for one round of a client's training, by those defenses of the run that act in training.

    ```python
    with fedveil.flower.guarded(model, loss, context, batch_size=32, dataset_size=len(data)) as guard:
        for x, y in loader:
            optimizer.zero_grad()
            guard.backward(x, y)
            optimizer.step()
    ```

    defense: the whole chain; by default the run's setting `defense`. The defenses of the upload are left to the mod
        `protect`, which must be given the same chain: it sends nothing where they were needed and did not act.

    The ledger and memory that lasts over rounds are kept in `context.state`, memory of a round (FedEM's δ) is not. With
    a chain that has nothing to do in training, the gradients are the plain ones.
    """
    chain = Chain.of(_chosen(defense, context))
    local = training_part(chain)
    guard = Guard(
        model,
        loss,
        local,
        client=int(context.node_config.get(PARTITION, 0)),
        batch_size=batch_size if local.random_sizes else None,
        dataset_size=dataset_size if local.random_sizes else None,
        validation=validation,
        perturb=perturb,
        seed=seed,
    )
    _restore(guard, context.state)
    guard.new_round()
    before = guard.ledger.count(guard._client)
    yield guard
    steps = guard.ledger.count(guard._client) - before
    _keep(guard, context.state)
    rate = min(1.0, batch_size / dataset_size) if batch_size and dataset_size else 1.0
    context.state[NOTE] = ConfigRecord({"chain": str(local), "steps": steps, "example-rate": rate})


def loader(guard: Guard, data: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """Batches of one epoch: drawn by chance where a defense needs that (DP-SGD), else all examples in a new order."""
    if guard.chain.random_sizes:
        return poisson_loader(data, batch_size)
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def training_part(chain: Chain) -> Chain:
    """The defenses of a chain that act in training: on the choice of a batch, the data, the gradient of a step."""
    return Chain(tuple(defense for defense in chain.defenses if defense.acts_at in ("sample", "data", "gradient")))


def guarded_steps(state: RecordDict) -> Local:
    """What the training of this message noted; nothing where it was not guarded."""
    note = state.config_records.get(NOTE)
    if note is None:
        return Local(Chain(), 0)
    return Local(Chain.of(str(note["chain"])), int(str(note["steps"])), float(str(note["example-rate"])))


def forget(state: RecordDict) -> None:
    """Forget the note of an earlier message, so that it cannot speak for this one."""
    if NOTE in state:
        del state[NOTE]


def _chosen(defense: Any, context: Context) -> Any:
    told = context.run_config.get("defense")
    if defense is None and told is None:
        raise FedveilError('no defense is set: give guarded() one, or the run a setting defense = "..."')
    return told if defense is None else defense


def _restore(guard: Guard, state: RecordDict) -> None:
    facts = state.config_records.get(STATE)
    if facts is None:
        return
    told = json.loads(str(facts["state"]))
    told["states"] = [{} for _ in guard.chain.defenses]
    for name, tensor in to_tensors(state.array_records.get(KEPT, {})).items():
        position, _, own = name.partition("/")
        told["states"][int(position)][own] = tensor
    guard.load_state_dict(told)


def _keep(guard: Guard, state: RecordDict) -> None:
    told = guard.state_dict()
    lasting = {f"{place}/{name}": t for place, own in enumerate(told.pop("states")) for name, t in own.items()}
    state[STATE] = ConfigRecord({"state": json.dumps(told)})
    if lasting:
        state[KEPT] = to_record(lasting)
