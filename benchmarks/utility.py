"""What every defense costs: accuracy and time on Fashion-MNIST, at the paper's default and at a strong setting.

Small runs that rank the defenses by their cost; not the papers' accuracies.
Needs Fashion-MNIST's files under FEDVEIL_DATA; without them this part is left out, and says so.
"""

from __future__ import annotations

import statistics

import torch

import fedveil as fv
from benchmarks.tables import Table
from fedveil.errors import FedveilError
from fedveil.federation.run import Run
from fedveil.registry import defenses

STRONG = {
    "cdp": "cdp:noise_multiplier=0.5",
    "clip": "clip:norm=0.1",
    "dp-clip": "dp-clip:sigma=0.03",
    "dp-gaussian": "dp-gaussian:epsilon=0.9",
    "dp-laplace": "dp-laplace:epsilon=0.9",
    "dp-sgd": "dp-sgd:noise_multiplier=1.0",
    "duchi": "duchi:epsilon=0.5",
    "fedbarre": "fedbarre:high=8",
    "fedcrap": "fedcrap:radius=1024/255",
    "fedem": "fedem:radius=1024/255",
    "gaussian-noise": "gaussian-noise:sigma=16/255",
    "gradient-dropout": "gradient-dropout:keep=0.3,sigma=0.05",
    "gradient-masking": "gradient-masking:share=0.9",
    "gradient-pruning": "gradient-pruning:prune=0.999",
    "laplace-noise": "laplace-noise:scale=16/255",
    "ldp-fl": "ldp-fl:epsilon=0.5",
    "ldpm": "ldpm:sigma=0.1",
    "noise-add": "noise-add:ratio=2",
    "pm": "pm:epsilon=0.5",
    "pnpm": "pnpm:epsilon=0.3",
    "ppfa": "ppfa:epsilon=0.8",
    "sign-compression": "sign-compression:scale=0.01",
    "soteria": "soteria:prune=0.95,features=16",
    "spm": "spm:epsilon=0.1",
}
DEFAULT = {"soteria": "soteria:features=16"}  # one backward pass per feature is dear: score a part
RATES = {"lenet": 0.5, "mlp": 0.1}
TRIED = 960


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
            f"Cost of every defense, Fashion-MNIST, {model}, 4 clients",
            ["defense", "protocol", "test accuracy", "points against undefended", "time of a round"],
            f"{TRIED} training images, 3 rounds, batch 8, rate {lr}, one thread; time as a multiple of the undefended "
            "round of the same protocol. Under FedAvg (one local epoch) stand the defenses of the upload alone.",
        )
        plain = {protocol: train(task, None, protocol, lr) for protocol in ("fedsgd", "fedavg")}
        for protocol, run in plain.items():
            table.add("none", protocol, percent(run), "", "1")
        for name in defenses.entries():
            if name == "none":
                continue
            for spec in (DEFAULT.get(name, name), *([STRONG[name]] if name in STRONG else [])):
                protocol = "fedavg" if defenses.parse(spec).acts_at == "upload" else "fedsgd"
                try:
                    run = train(task, spec, protocol, lr)
                except FedveilError as error:
                    table.add(spec, protocol, str(error).partition(":")[0], "", "")
                    continue
                base = plain[protocol]
                gain = 100 * ((run.utility.test or 0) - (base.utility.test or 0))
                table.add(spec, protocol, percent(run), f"{gain:+.1f}", f"{seconds(run) / seconds(base):.2f}×")
                print(spec, table.rows[-1][2:], flush=True)
        tables.append(table)
    return tables


def train(task: fv.Task, spec: str | None, protocol: str, lr: float) -> Run:
    settings = fv.Federation(protocol=protocol, rounds=3, batch_size=8, lr=lr)  # type: ignore[arg-type]
    return fv.federate(task, spec, settings, backend="stacked")


def seconds(run: Run) -> float:
    return statistics.median([record.seconds for record in run.history[1:]])


def percent(run: Run) -> str:
    return f"{100 * (run.utility.test or 0):.1f} %"
