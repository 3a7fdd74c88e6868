"""What every defense costs: accuracy and time on Fashion-MNIST, at the paper's default and at a strong setting.

Short runs that rank the defenses by their cost; not the papers' accuracies.
Needs Fashion-MNIST's files under FEDVEIL_DATA; without them this part is left out, and says so.
"""

from __future__ import annotations

from operator import truediv

import torch

import fedveil as fv
from benchmarks import costs
from benchmarks.tables import Table
from benchmarks.timing import turns, typical
from fedveil.clients.engine import Engine
from fedveil.errors import FedveilError
from fedveil.registry import defenses

STRONG = {
    "cdp": "cdp:noise_multiplier=4",
    "clip": "clip:norm=0.1",
    "dp-clip": "dp-clip:sigma=0.03",
    "dp-gaussian": "dp-gaussian:epsilon=0.9",
    "dp-laplace": "dp-laplace:epsilon=0.9",
    "dp-sgd": "dp-sgd:noise_multiplier=4",
    "duchi": "duchi:epsilon=0.1",
    "fedbarre": "fedbarre:high=8",
    "fedcrap": "fedcrap:radius=1024/255",
    "fedem": "fedem:radius=1024/255",
    "gaussian-noise": "gaussian-noise:sigma=16/255",
    "gradient-dropout": "gradient-dropout:keep=0.3,sigma=0.05",
    "gradient-masking": "gradient-masking:share=0.9",
    "gradient-pruning": "gradient-pruning:prune=0.999",
    "laplace-noise": "laplace-noise:scale=16/255",
    "ldp-fl": "ldp-fl:epsilon=0.1",
    "ldpm": "ldpm:sigma=0.1",
    "noise-add": "noise-add:ratio=2",
    "pm": "pm:epsilon=0.1",
    "pnpm": "pnpm:epsilon=0.1",
    "ppfa": "ppfa:epsilon=0.5",
    "sign-compression": "sign-compression:flip=0.3",
    "soteria": "soteria:prune=0.95,features=16",
    "spm": "spm:epsilon=0.1",
}
DEFAULT = {"soteria": "soteria:features=16"}  # one backward pass per feature is dear: score a part
GENTLE = {"fedbarre": "fedbarre:lr=0.01"}  # at its published rate the global model does not learn without a warm-up
RATES = {"lenet": 0.5, "mlp": 0.1}
TRIED, SIZE, ROUNDS = 4800, 16, 3


def measure() -> list[Table]:
    torch.set_num_threads(1)
    tables = []
    for model, lr in RATES.items():
        try:
            task = fv.task("fashion-mnist", model=model, limit=TRIED)
        except FedveilError as error:
            print(f"utility is left out: {error}")
            return []
        table = Table(
            f"What every defense costs, Fashion-MNIST, {model}, 4 clients",
            ["defense", "protocol", "test accuracy", "points against undefended", "time"],
            f"{TRIED} training images, {ROUNDS} rounds, batch {SIZE}, rate {lr}, each defense at its default and at a "
            "strong setting. Time: processor time of a step (FedSGD) or a round of one local epoch (FedAvg) against "
            "the undefended one, batch 8, one thread. Under FedAvg stand the defenses of the upload alone.",
        )
        engine = Engine(task.model, task.loss, backend="stacked", chunk=len(costs.CLIENTS))
        plain = {protocol: accuracy(task, "none", protocol, lr) for protocol in ("fedsgd", "fedavg")}
        for protocol, reached in plain.items():
            table.add("none", protocol, f"{reached:.1f} %", "", "1")
        for name in defenses.entries():
            if name == "none":
                continue
            for spec in (DEFAULT.get(name, name), *(some[name] for some in (GENTLE, STRONG) if name in some)):
                protocol = "fedavg" if defenses.parse(spec).acts_at == "upload" else "fedsgd"
                try:
                    reached = accuracy(task, spec, protocol, lr)
                except FedveilError as error:
                    table.add(spec, protocol, str(error).partition(":")[0], "", "")
                    continue
                gain = f"{reached - plain[protocol]:+.1f}"
                table.add(spec, protocol, f"{reached:.1f} %", gain, f"{slower(task, engine, spec, protocol):.2f}×")
                print(spec, table.rows[-1][2:], flush=True)
        tables.append(table)
    return tables


def accuracy(task: fv.Task, spec: str, protocol: str, lr: float) -> float:
    settings = fv.FederationSettings(protocol=protocol, rounds=ROUNDS, batch_size=SIZE, lr=lr)  # type: ignore[arg-type]
    return 100 * (fv.federate(task, spec, settings, backend="stacked", workers=1).utility.test or 0)


def slower(task: fv.Task, engine: Engine, spec: str, protocol: str) -> float:
    timed = costs.step if protocol == "fedsgd" else costs.local_round
    times = turns({name: timed(task, engine, name) for name in ("none", spec)}, 9, 0.02, processor=True)
    return typical(truediv, times[spec], times["none"])
