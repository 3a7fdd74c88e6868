"""A whole FedAvg run beside pfl 0.6.0 and beside a plain loop, on both cores.

100 clients of 600 MNIST images, 10 a round, LeNet-5, batch 10, one local epoch, 20 rounds. Each run has a process of
its own; timed is the call that trains, whatever it starts and compiles included, and for fedveil a second call with
the same workers, which are then warm as the others' processes are. The accuracy is taken afterwards, on
all test images, by the same lines for all sides: fedveil's own evaluation of every round is given one image.
Without MNIST's files under FEDVEIL_DATA the images are random, which changes the accuracy and not the work.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedveil as fv
from benchmarks.peers.environment import python_of
from benchmarks.tables import Table
from fedveil.clients.engine import Backend
from fedveil.errors import FedveilError
from fedveil.memory import keep_freed_memory
from fedveil.registry import datasets, models
from fedveil.tasks.task import build_model
from fedveil.workers import Workers

ROOT = Path(__file__).parents[1]
CLIENTS, PER_ROUND, OWN, BATCH, ROUNDS, RATE = 100, 10, 600, 10, 20, 0.1
WORKERS = 2  # processes of `federate`, one for each core
WARM_RUNS = 1  # of each side, in turns; the best counts


def measure() -> list[Table]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = prepare(folder / "workload.pt")
        table = Table(
            f"FedAvg: {CLIENTS} clients, {PER_ROUND} a round, {OWN} samples each, LeNet-5, batch {BATCH}, "
            f"{ROUNDS} rounds, two cores",
            ["side", "caches", "seconds", "per round", "plain loop ÷ this", "pfl ÷ this", "test accuracy"],
            f"{kind}. The call that trains, in a process of its own; the best of {WARM_RUNS} runs in turns, cold ones "
            "once. Caches: of compiled code, on disk. A second call finds workers that have loaded "
            "libraries and compiled code, as pfl's processes have when its clock starts. The ratios are to the faster "
            "plain loop and to the faster pfl.",
        )
        cold = {f"fedveil {backend}": ours(folder, backend) for backend in ("auto", "compiled")}
        warm: dict[str, dict[str, float]] = {}
        for _ in range(WARM_RUNS):
            runs = {
                "plain loop, two threads": side(folder, "plain"),
                "plain loop, one thread": side(folder, "plain", OMP_NUM_THREADS="1"),
                "pfl 0.6.0, one process": pfl(folder, processes=1),
                "pfl 0.6.0, two processes": pfl(folder, processes=2),
                **{f"fedveil {backend}": ours(folder, backend) for backend in ("auto", "compiled")},
            }
            for backend in ("auto", "compiled"):
                first = runs[f"fedveil {backend}"]
                runs[f"fedveil {backend}, second call"] = {**first, "seconds": first["again"]}
            for label, run in runs.items():
                warm[label] = min(warm.get(label, run), run, key=lambda found: found["seconds"])
        plain, peer = (
            min(run["seconds"] for label, run in warm.items() if label.startswith(name)) for name in ("plain", "pfl")
        )
        for caches, runs in (("full", warm), ("empty", cold)):
            for label, run in runs.items():
                seconds = run["seconds"]
                ratios = (f"{plain / seconds:.2f}×", f"{peer / seconds:.2f}×")
                table.add(label, caches, seconds, seconds / ROUNDS, *ratios, f"{100 * run['accuracy']:.1f} %")
        return [table]


def prepare(path: Path) -> str:
    """Write what all sides share: model, data, who holds what, settings. Returns what the images are."""
    try:
        data = datasets.parse("mnist").load(None)
        normalization = data.normalization
        train, test = ((torch.from_numpy(p.images), torch.from_numpy(p.labels)) for p in (data.train, data.test))
        kind = "MNIST"
    except FedveilError as error:
        print(f"random images take MNIST's place: {error}")
        normalization = fv.Normalization((0.5,), (0.25,))
        train, test = (
            (torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (count,)))
            for count in (CLIENTS * OWN, 10_000)
        )
        kind = "Random images of MNIST's shape (the accuracy means nothing)"
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))
    work = {
        "model": build_model(models.build("lenet5"), (1, 28, 28), 10, seed=0),
        "pixels": train[0],
        "inputs": normalization.normalize(train[0] / 255),
        "targets": train[1],
        "test_pixels": test[0],
        "test_inputs": normalization.normalize(test[0] / 255),
        "test_targets": test[1],
        "normalization": (normalization.mean, normalization.std),
        "clients": list(torch.split(order[: CLIENTS * OWN], OWN)),
        "per_round": PER_ROUND,
        "batch_size": BATCH,
        "rounds": ROUNDS,
        "lr": RATE,
    }
    torch.save(work, path)
    return kind


# ---- the sides, each in a process of its own ------------------------------------------------------------


def plain_loop(work: Mapping[str, Any], judged: int = 0) -> nn.Module:
    """FedAvg as one would write it for one process: the data in memory, one model that is loaded and trained.

    judged: on how many images the model is evaluated before the first round and after every one.
    """
    model, inputs, targets = work["model"], work["inputs"], work["targets"]
    params = list(model.parameters())
    weights = [p.detach().clone() for p in params]
    optimizer = torch.optim.SGD(params, lr=work["lr"])
    draw = random.Random(0)
    torch.manual_seed(0)
    evaluate(model, work, judged)
    for _ in range(work["rounds"]):
        sums = [torch.zeros_like(weight) for weight in weights]
        for client in draw.sample(range(len(work["clients"])), work["per_round"]):
            load(params, weights)
            own = work["clients"][client]
            for batch in torch.split(own[torch.randperm(len(own))], work["batch_size"]):
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for total, p in zip(sums, params, strict=True):
                total += p.detach()
        weights = [total / work["per_round"] for total in sums]
        load(params, weights)
        evaluate(model, work, judged)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def evaluate(model: nn.Module, work: Mapping[str, Any], count: int) -> list[float]:
    """The share of right classes in so many images, in batches of fedveil's size."""
    inputs, targets = work["inputs"][:count], work["targets"][:count]
    batches = zip(inputs.split(256), targets.split(256), strict=True) if count else ()
    return [(model(some).argmax(1) == right).float().mean().item() for some, right in batches]


@torch.no_grad()
def load(params: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    for p, weight in zip(params, weights, strict=True):
        p.copy_(weight)


def fedveil_run(work: Mapping[str, Any], backend: Backend) -> tuple[nn.Module, float, float]:
    """The trained model, the seconds of `federate`, and those of a second call with the same workers."""
    task = fv.Task(
        work["model"],
        ((work["pixels"], work["targets"]), (work["test_pixels"][:1], work["test_targets"][:1])),
        clients=work["clients"],
        normalization=fv.Normalization(*work["normalization"]),
    )
    settings = fv.FederationSettings(
        protocol="fedavg",
        rounds=work["rounds"],
        batch_size=work["batch_size"],
        lr=work["lr"],
        sampling_rate=work["per_round"] / len(work["clients"]),
    )
    seconds = []
    with Workers(WORKERS) as workers:
        for _ in range(2):
            start = time.perf_counter()
            run = fv.federate(task, None, settings, backend=backend, workers=workers)
            seconds.append(time.perf_counter() - start)
    work["model"].load_state_dict({**run.params, **run.buffers})
    return work["model"], seconds[0], seconds[1]


def main(name: str, path: str, backend: Backend = "auto", judged: str = "0") -> None:
    """One side: prints its time and its accuracy as JSON."""
    work = torch.load(path, weights_only=False)
    if name == "plain":
        start = time.perf_counter()
        model = plain_loop(work, int(judged))
        seconds = time.perf_counter() - start
        again = 0.0
    else:
        keep_freed_memory()  # as the command line does
        model, seconds, again = fedveil_run(work, backend)
    with torch.no_grad():
        right = model(work["test_inputs"]).argmax(1) == work["test_targets"]
    print(json.dumps({"seconds": seconds, "again": again, "accuracy": right.double().mean().item()}))


# ---- starting them --------------------------------------------------------------------------------------


def side(folder: Path, *arguments: str, **environment: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.fedavg", arguments[0], str(folder / "workload.pt"), *arguments[1:]]
    return finished(start(command, environment))


def ours(folder: Path, backend: str) -> dict[str, float]:
    """Our side. Each backend has its own caches: the first run finds them empty, the next ones full."""
    caches = folder / backend
    places = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "compiled"), "FEDVEIL_CACHE": str(caches / "fedveil")}
    return side(folder, "ours", backend, **places)


def pfl(folder: Path, processes: int) -> dict[str, float]:
    """pfl's side, in one process with torch's own threads or spread by pfl over processes of one thread."""
    script = ROOT / "benchmarks" / "peers" / "pfl_side.py"
    command = [str(python_of("pfl")), str(script), str(folder / "workload.pt")]
    if processes == 1:
        return finished(start(command, {}))
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(processes))
    spread = {"PFL_WORKER_ADDRESSES": addresses, "OMP_NUM_THREADS": "1"}
    started = [start(command, {**spread, "PFL_WORKER_RANK": str(rank)}) for rank in range(processes)]
    first = finished(started[0])
    for other in started[1:]:
        other.communicate()
    return first


def free_ports(count: int) -> list[int]:
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in found]
    for server in found:
        server.close()
    return ports


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    default = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    both = {"env": {**default, **environment}, "cwd": ROOT, "text": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **both)  # type: ignore[call-overload,no-any-return]


def finished(process: subprocess.Popen[str]) -> dict[str, float]:
    """What a side printed in its last line."""
    out, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a side of the benchmark failed:\n{errors}")
    found: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    print("  ", *process.args[1:], found, flush=True)  # type: ignore[index]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
