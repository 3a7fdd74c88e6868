"""How good the models are that clients have of their own: other numbers than that of the server's model.

SPM-FL reports the accuracy of local models before their upload is perturbed, FedBARRE has an ensemble that never
leaves its client. Neither is the accuracy of the model that the federation arrives at, and so they stand beside it.
"""

from __future__ import annotations

from fedveil.defenses.base import keeps_models
from fedveil.federation.evaluate import Evaluator
from fedveil.federation.schedule import batches, epoch_orders
from fedveil.federation.server import Server
from fedveil.federation.steps import Plan
from fedveil.tree import Tree

LOCAL = "local models before the upload"


def own_utilities(
    plan: Plan, evaluator: Evaluator, server: Server, number: int, clients: list[int]
) -> dict[str, float]:
    """Mean test utility over the first `local_utility` clients of a round, by the kind of model; {} unless asked for.

    What a defense lets a client keep is trained anew on its first batch of the round, from the server's new weights.
    Nothing of it goes into the training.
    """
    values: dict[str, list[float | None]] = {}
    if server.trained:
        values[LOCAL] = [evaluator.test_value(params, buffers) for params, buffers in server.trained.values()]
        server.trained = {}
    chain = plan.chain_at(number)
    if any(keeps_models(defense) for defense in chain.defenses):
        for client in clients[: plan.settings.local_utility]:
            own = plan.task.clients[client]
            order = epoch_orders(plan.seed, client, number, len(own))[0]
            data = plan.read(plan.task.train, [batches(own[order], plan.settings.batch_size)[0]])
            buffers = server.buffers_of(plan, [client])
            path = ("round", number, "own models")
            batch = plan.batch([client], Tree.expand(server.params, 1), buffers, data, path, chain)
            for kept in chain.own_models(batch):
                each = [evaluator.test_value(member.row(0), buffers.row(0)) for member in kept.members]
                values.setdefault(kept.name, []).append(_mean(each, kept.share[0].tolist()))
    means = {name: _mean(each, [1 / len(each)] * len(each)) for name, each in values.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(values: list[float | None], shares: list[float]) -> float | None:
    """None where the task has nothing to measure utility by."""
    known = [share * value for share, value in zip(shares, values, strict=True) if value is not None]
    return sum(known) if len(known) == len(values) else None
