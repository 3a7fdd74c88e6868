"""Whole jobs as a user starts them: the command line with its defaults, from its start to its end, beside the peers.

    python -m benchmarks fedavg-as-it-comes   # `fedveil train`, empty and full caches; plain loop, pfl, Flower
    python -m benchmarks verdicts             # `fedveil audit` to its verdict, and what that is made of
    python -m benchmarks memory               # up to 500 clients of resnet18 under FedAvg

Times are those of a clock on the wall, from starting the process to its end. Memory is the most that was resident at
one time in all processes of the job together, looked at once a second: to look takes the time of what is looked at.
Needs Linux, and data under FEDVEIL_DATA. BENCH_SMALL=1 tries everything at a small size.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import fedveil as fv
from benchmarks import fedavg
from benchmarks.peers.environment import python_of
from benchmarks.tables import Table
from fedveil.errors import FedveilError
from fedveil.memory import keep_freed_memory
from fedveil.registry import datasets, models
from fedveil.tasks.task import build_model

ROOT = Path(__file__).parents[1]
SMALL = os.environ.get("BENCH_SMALL") == "1"
ROUNDS = 2 if SMALL else fedavg.ROUNDS
PEERS = ROOT / "benchmarks" / "peers"
LIMIT = 3600 if not SMALL else 600  # seconds that a job may take
JUDGED = 17_000  # images that `fedveil train` evaluates after every round here
NOT_A_USERS = {"OMP_NUM_THREADS", "FEDVEIL_CACHE", "PYTHONDONTWRITEBYTECODE"}  # of the environment


@dataclass(frozen=True)
class Job:
    """What a job cost."""

    seconds: float
    peak: float  # bytes
    output: str


def run(command: Sequence[object], environment: Mapping[str, str] | None = None) -> Job:
    """Run a command to its end, and look at the memory of all its processes meanwhile."""
    default = {name: value for name, value in os.environ.items() if name not in NOT_A_USERS}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env={**default, **(environment or {})},
            stdout=out,
            stderr=errors,
            start_new_session=True,  # so that all its processes are found
        )
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            if time.perf_counter() - start > LIMIT:
                process.kill()
                raise RuntimeError(f"longer than {LIMIT} s: {command}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        seconds = time.perf_counter() - start
        for stream in (out, errors):
            stream.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command} failed:\n{errors.read()[-2000:]}")
        job = Job(seconds, peak, out.read())
    print("  ", *[str(word)[-60:] for word in command], f"{job.seconds:.1f} s, {job.peak / 1e9:.2f} GB", flush=True)
    return job


def resident(session: int) -> float:
    """Bytes that all processes of a session have of their own, their shares of what they have in common included."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) == session:
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += sum(1024 * float(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    return total


# ---- FedAvg -----------------------------------------------------------------------------------------------------


def fedavg_as_it_comes() -> list[Table]:
    try:
        datasets.parse("mnist").load(None)
    except FedveilError as error:
        print(f"fedavg-as-it-comes is left out: {error}")
        return []
    table = Table(
        f"FedAvg as it comes: {fedavg.CLIENTS} clients, {fedavg.PER_ROUND} a round, {fedavg.OWN} images each, LeNet-5, "
        f"batch {fedavg.BATCH}, {ROUNDS} rounds, MNIST, two cores",
        ["side", "caches", "seconds", "against this run", "peak memory (GB)"],
        "Whole wall time of the process, from its start to its end. `fedveil train` with default settings, which also "
        "evaluates the model after every round, on all test images, 6,000 that it keeps out of training and 1,000 of "
        "training, and keeps checkpoints; the peers only train, on all 60,000. The loop that "
        "evaluates does so as often, on as many images.",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds, fedavg.ROUNDS = fedavg.ROUNDS, ROUNDS
        try:
            fedavg.prepare(folder / "workload.pt")
        finally:
            fedavg.ROUNDS = rounds
        work = folder / "workload.pt"
        compileall.compile_dir(ROOT / "src", quiet=1)  # as the code of an installed package is
        caches = {"FEDVEIL_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        first, second = (run(train_command(folder / f"out{k}"), caches) for k in range(2))
        sides = {
            ("plain loop, one thread", "–"): run(plain_command(work), {"OMP_NUM_THREADS": "1"}),
            ("plain loop, two threads", "–"): run(plain_command(work)),
            ("plain loop that evaluates, one thread", "–"): run(plain_command(work, JUDGED), {"OMP_NUM_THREADS": "1"}),
            ("plain loop that evaluates, two threads", "–"): run(plain_command(work, JUDGED)),
            ("pfl 0.6.0, two processes", "–"): pfl_job(work),
            ("Flower simulation, two actors", "–"): run([python_of("flower"), PEERS / "flower_side.py", work], QUIET),
            ("fedveil train, not compiled", "–"): run([*train_command(folder / "out2"), "--backend", "loop"], caches),
            ("fedveil train", "empty"): first,
            ("fedveil train", "full"): second,
        }
        for (side, cached), job in sides.items():
            table.add(side, cached, job.seconds, f"{job.seconds / second.seconds:.2f}×", f"{job.peak / 1e9:.2f}")
    return [table]


QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def train_command(out: Path) -> list[object]:
    return [
        *fedveil("train", "--data", "mnist", "--model", "lenet5", "--clients", fedavg.CLIENTS),
        *("--protocol", "fedavg", "--rounds", ROUNDS, "--batch-size", fedavg.BATCH, "--lr", fedavg.RATE),
        *("--sampling-rate", fedavg.PER_ROUND / fedavg.CLIENTS, "--out", out, "--quiet"),
    ]


def fedveil(*words: object) -> list[object]:
    return [Path(sys.executable).parent / "fedveil", *words]


def plain_command(work: Path, judged: int = 0) -> list[object]:
    return [sys.executable, "-m", "benchmarks.fedavg", "plain", work, "auto", judged]


def pfl_job(work: Path) -> Job:
    """pfl spread over two processes; the first one's time, and the memory of both."""
    addresses = ",".join(f"127.0.0.1:{port}" for port in fedavg.free_ports(2))
    spread = {"PFL_WORKER_ADDRESSES": addresses, "OMP_NUM_THREADS": "1"}
    words = " ".join([str(python_of("pfl")), str(PEERS / "pfl_side.py"), str(work)])
    both = f"PFL_WORKER_RANK=1 {words} & PFL_WORKER_RANK=0 {words}; code=$?; wait; exit $code"
    return run(["bash", "-c", both], spread)


# ---- time to a verdict ------------------------------------------------------------------------------------------


STAGES = ("train", "observe", "fit", "attack", "score")
SMALL_AUDIT = ("--rounds", 1, "--limit", 400, "--victims", 4, "--attack", "inverting-gradients:steps=20")
# With default settings, ten rounds of a ResNet-18 on all of CIFAR-10 would take hours here before anything is attacked.
AUDITS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("mnist", "lenet", ()),
    ("cifar10", "resnet18:norm=group", ("--rounds", 1, "--limit", 400, "--victims", 4, "--suite", "quick")),
)


def verdicts() -> Iterator[list[Table]]:
    table = Table(
        "Time to a verdict: `fedveil audit`, two cores",
        ["audit", "caches", "seconds", "start and train", *STAGES[1:], "judging and report", "peak memory (GB)"],
        "Whole wall time of the process, and of its stages by when each left its results in the store. A store of its "
        "own each time: nothing is taken from before but what is compiled and calibrated. Default settings but for "
        "the options that are named.",
    )
    for data, model, options in AUDITS:
        try:
            datasets.parse(data).load(None)
        except FedveilError as error:
            print(f"the audit of {data} is left out: {error}")
            continue
        with tempfile.TemporaryDirectory() as name:
            caches = {"FEDVEIL_CACHE": f"{name}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor"}
            for cached in ("empty", "full"):
                folder = Path(name) / cached
                words = fedveil("audit", "--data", data, "--model", model, "--out", folder / "out", "--quiet")
                began = time.time()
                job = run([*words, "--store", folder / "store", *(SMALL_AUDIT if SMALL else options)], caches)
                parts = stages(folder / "store", began)
                named = [parts.get(stage, 0.0) for stage in STAGES]
                rest = job.seconds - sum(parts.values())
                audit = f"`{' '.join(map(str, ('--data', data, '--model', model, *options)))}`"
                table.add(audit, cached, job.seconds, *named, rest, f"{job.peak / 1e9:.2f}")
                yield [table]


def stages(store: Path, began: float) -> dict[str, float]:
    """The seconds until each entry of a store was written since the one before, added up by stage."""
    written = sorted((entry.stat().st_mtime, entry.parents[1].name) for entry in store.glob("*/*/entry.safetensors"))
    found: dict[str, float] = {}
    for moment, stage in written:
        found[stage] = found.get(stage, 0.0) + moment - began
        began = moment
    return found


# ---- memory -----------------------------------------------------------------------------------------------------


def memory() -> list[Table]:
    counts = (4, 20) if SMALL else (20, 100, 500)
    table = Table(
        "Memory: resnet18 under FedAvg, all clients in every round",
        ["clients", "workers", "seconds", "peak memory (GB)", "limit"],
        "2 rounds of one local step of 4 random images of CIFAR-10's shape for each client. All processes together, "
        "libraries included.",
    )
    for workers in (1, 2):
        for count in counts:
            job = run([sys.executable, "-m", "benchmarks.whole_jobs", count, workers])
            table.add(count, workers, job.seconds, f"{job.peak / 1e9:.2f}", "4 at 500 clients")
    return [table]


def main(clients: int, workers: int) -> None:
    """Train such a federation."""
    keep_freed_memory()  # as the command line does
    own = 4
    images = torch.randint(0, 256, (clients * own, 3, 32, 32), dtype=torch.uint8)
    data = images, torch.arange(clients * own) % 10
    task = fv.Task(
        build_model(models.parse("resnet18:norm=group"), (3, 32, 32), 10, seed=0),
        (data, (images[:own], data[1][:own])),
        clients=list(torch.split(torch.arange(clients * own), own)),
        normalization=fv.Normalization((0.5,) * 3, (0.25,) * 3),
    )
    settings = fv.FederationSettings(protocol="fedavg", rounds=2, batch_size=own)
    fv.federate(task, None, settings, workers=workers)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
