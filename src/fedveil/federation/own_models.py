"""How good the models are that clients have of their own: other numbers than that of the server's model.

SPM-FL reports the accuracy of local models before their upload is perturbed, FedBARRE has an ensemble that never
leaves its client. Neither is the accuracy of the model that the federation arrives at, and so they stand beside it.
"""

from __future__ import annotations

from fedveil.defenses.base import keeps_models
from fedveil.federation.client_memory import ClientMemory
from fedveil.federation.evaluate import Evaluator
from fedveil.federation.plan import Moment
from fedveil.federation.server import Server
from fedveil.federation.steps import Group, Prepared, RoundTally
from fedveil.tree import Tree

LOCAL = "local models before the upload"


def own_utilities(
    prepared: Prepared, evaluator: Evaluator, server: Server, memory: ClientMemory, tally: RoundTally
) -> dict[str, float]:
    """Mean test utility over the first `local_utility` clients of a round, by the kind of model; {} unless asked for.

    What a defense lets a client keep is trained anew on its first batch of the round, from the server's new weights.
    Nothing of it goes into the training.
    """
    values: dict[str, list[float | None]] = {}
    if tally.trained:
        values[LOCAL] = [evaluator.test_value(params, buffers) for params, buffers in tally.trained.values()]
    plan = prepared.plan
    chain = plan.chain_at(tally.number)
    if any(keeps_models(defense) for defense in chain.defenses):
        chosen = tally.clients[: plan.settings.local_utility]
        for client, walk in plan.walks(tally.number, chosen).items():
            params, buffers = Tree.expand(server.params, 1), memory.buffers_of([client], server.buffers)
            group = Group([client], params, buffers, prepared.read(plan.task.train, [walk[0]]))
            for kept in chain.own_models(prepared.batch(group, Moment(tally.number, "own models"))):
                each = [evaluator.test_value(member.row(0), buffers.row(0)) for member in kept.members]
                values.setdefault(kept.name, []).append(_mean(each, kept.share[0].tolist()))
    means = {name: _mean(each, [1 / len(each)] * len(each)) for name, each in values.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(values: list[float | None], shares: list[float]) -> float | None:
    """None where the task has nothing to measure utility by."""
    known = [share * value for share, value in zip(shares, values, strict=True) if value is not None]
    return sum(known) if len(known) == len(values) else None
