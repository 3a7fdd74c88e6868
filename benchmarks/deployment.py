"""The FedAvg run as Flower runs it: its simulation and a deployment on one machine, beside the in-process engine.

    python -m benchmarks deployment

Every side is fedveil's own command with the same task: as many clients as the FedAvg run has in a round, with as many
images each, and all of them in every round. The deployment is Flower's SuperLink with one SuperNode for each client, as
processes on the loopback, without TLS. BENCH_SMALL=1 tries it at a small size.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks import fedavg
from benchmarks.tables import Table, measured
from benchmarks.whole_jobs import SMALL, fedveil, run
from fedveil.errors import FedveilError
from fedveil.flower.launch import LOOPBACK, Program, environment, free_port, program, until_open
from fedveil.registry import datasets

CLIENTS, OWN = (2, 60) if SMALL else (fedavg.PER_ROUND, fedavg.OWN)
SIDES = {  # and their rounds: one of a deployment takes as long as a whole run in process
    "fedveil train": 2 if SMALL else fedavg.ROUNDS,
    "fedveil federate --simulate": 2 if SMALL else fedavg.ROUNDS,
    "fedveil federate --superlink": 2,
}


def measure() -> Iterator[list[Table]]:
    try:
        datasets.parse("mnist").load(None)
    except FedveilError as error:
        print(f"deployment is left out: {error}")
        return
    table = Table(
        f"FedAvg over Flower: {CLIENTS} clients in every round, {OWN} images each, LeNet-5, batch {fedavg.BATCH}, "
        "MNIST, two cores",
        ["side", "rounds", "seconds", "the first round", "each later round"],
        "Whole wall time of the command, evaluations included; of the deployment without starting its SuperLink and "
        f"{CLIENTS} SuperNodes, which is a matter of once. A round: from its first message to its model, as "
        "`rounds.jsonl` tells it; without a whole time, the run was ended after these rounds. `fedveil train` finds "
        "its compiled code kept by an earlier run. No defense.",
    )
    for earlier in measured("deployment"):
        table.rows = earlier.rows if earlier.title == table.title else []
    for side, rounds in SIDES.items():
        if any(row[0] == side for row in table.rows):
            continue
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            where: list[object] = []
            if side.endswith("--superlink"):
                where = ["--superlink", stack.enter_context(_Deployment(folder)).address, "--insecure"]
            elif side.endswith("--simulate"):
                where = ["--simulate"]
            else:
                run([*fedveil("train"), *_task(1), "--out", folder / "first"])
            job = run([*fedveil(side.split()[1], *where), *_task(rounds), "--out", folder / "out"])
            told = _seconds(folder / "out" / "rounds.jsonl")
        each = (f"{told[0]:.1f}", f"{median(told[1:]):.1f}") if told else ("–", "–")
        table.add(side, rounds, job.seconds, *each)
        yield [table]


def _task(rounds: int) -> list[object]:
    return [
        *("--data", "mnist", "--model", "lenet5", "--clients", CLIENTS, "--limit", CLIENTS * OWN),
        *("--protocol", "fedavg", "--rounds", rounds, "--batch-size", fedavg.BATCH, "--lr", fedavg.RATE),
    ]


def _seconds(path: Path) -> list[float]:
    if not path.exists():
        return []
    told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in told:
        if len(line.get("taken", range(CLIENTS))) != CLIENTS:
            raise RuntimeError(f"not all clients were in a round: {line}")
    return [float(line["seconds"]) for line in told if "seconds" in line]


class _Deployment:
    """A SuperLink and its SuperNodes; all of them are stopped at the end, by their ids."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._started: list[Program] = []
        self.address = f"{LOOPBACK}:{self._port}"

    def __enter__(self) -> _Deployment:
        try:
            superlink = self._start("superlink", "--insecure", "--host", LOOPBACK, "--port", self._port)
            until_open(superlink, self._port)
            for number in range(CLIENTS):
                told = f"partition-id={number} num-partitions={CLIENTS}"
                port = free_port()
                place = ("--superlink", self.address, "--host", LOOPBACK, "--port", port, "--node-config", told)
                until_open(self._start("supernode", "--insecure", *place), port)
            time.sleep(10.0)  # until all of them have made themselves known
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for each in reversed(self._started):
            each.stop(5.0)

    def _start(self, kind: str, *words: object) -> Program:
        name = f"{kind}-{len(self._started)}"
        home = self._folder / name
        home.mkdir()
        quiet = ("--disable-runtime-dependency-installation",) if kind == "superlink" else ()
        command = [program(f"flower-{kind}"), *map(str, words), *quiet]
        made = Program(command, environment(home, OMP_NUM_THREADS="1"), self._folder / f"{name}.log")
        self._started.append(made)
        return made


if __name__ == "__main__":
    for tables in measure():
        print(tables[-1].markdown(), file=sys.stdout, flush=True)
