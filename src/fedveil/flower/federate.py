"""`fedveil federate`: run a task over Flower without writing an app."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.auditing.experiment import read_toml
from fedveil.errors import FedveilError
from fedveil.flower.keeping import ROUNDS
from fedveil.flower.launch import Program, environment, program, simulating_superlink, write_connection
from fedveil.flower.task_server import ERROR, OUTCOME
from fedveil.flower.task_settings import KEY, SEEDED_NOISE, TRUTHS, TaskRun
from fedveil.toml import to_toml

LOG = "flower.log"
PYPROJECT = {
    "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
    "project": {"name": "fedveil-task", "version": "1.0.0", "dependencies": []},
}
CLIENT = '"""A fedveil task over Flower."""\n\nfrom fedveil.flower.task_client import app\n\n__all__ = ["app"]\n'
SERVER = CLIENT.replace("task_client", "task_server")


@dataclass(frozen=True)
class Where:
    """Where a task is run: in a simulation, or over a SuperLink."""

    superlink: str | None = None  # HOST:PORT; none: a simulation on this machine
    root_certificates: Path | None = None
    patience: float = 24 * 3600.0  # seconds after which a run counts as lost


def write_task_app(folder: Path, run: TaskRun) -> Path:
    """The smallest app that runs a task: its settings, and two files that name fedveil's own client and server."""
    package = folder / "fedveil_task"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('"""A fedveil task over Flower."""\n', encoding="utf-8")
    (package / "client.py").write_text(CLIENT, encoding="utf-8")
    (package / "server.py").write_text(SERVER, encoding="utf-8")
    app: dict[str, Any] = {
        "publisher": "fedveil",
        "components": {"serverapp": "fedveil_task.server:app", "clientapp": "fedveil_task.client:app"},
        "config": {"defense": run.defense, KEY: run.told()},
    }
    told = {**PYPROJECT, "tool": {"flwr": {"app": app}}}
    (folder / "pyproject.toml").write_text(to_toml(told), encoding="utf-8")
    return folder


def run_task(run: TaskRun, where: Where, told: Callable[[dict[str, Any]], None] = lambda line: None) -> dict[str, Any]:
    """Run a task to its end and return its outcome. `told` gets every round as it ends."""
    run.check()
    run = run.model_copy(update={"out": run.out.absolute(), "noise": "secure" if where.superlink else run.noise})
    run.out.mkdir(parents=True, exist_ok=True)
    log = run.out / LOG
    # A short path: sockets have names of a hundred letters at most.
    with tempfile.TemporaryDirectory(prefix="fedveil-") as home:
        app = write_task_app(Path(home) / "app", run)
        if where.superlink:
            return _submit(run, app, Path(home), where.superlink, where, told)
        env = environment(Path(home), RAY_TMPDIR=home)
        if run.noise == "seeded":
            env[SEEDED_NOISE] = "1"
            if run.federation.record_rounds:
                (run.out / "truths").mkdir(exist_ok=True)
                env[TRUTHS] = str(run.out / "truths")
        with simulating_superlink(Path(home), log, env) as port:
            return _submit(run, app, Path(home), f"127.0.0.1:{port}", where, told)


def run_app(app: Path, nodes: int | None, overrides: Sequence[str], log: Path) -> None:
    """Run an app in a simulation with as many nodes as its setting `clients` says, and show what Flower says."""
    told = read_toml(app / "pyproject.toml")
    try:
        config = told["tool"]["flwr"]["app"].get("config", {})
    except (KeyError, TypeError, AttributeError):
        raise FedveilError(f"{app} is not a Flower app: its pyproject.toml has no [tool.flwr.app]") from None
    count = nodes or config.get("clients")
    if not isinstance(count, int):
        raise FedveilError("how many clients to simulate is not among the app's settings: give --nodes")
    log.write_text("", encoding="utf-8")
    code = simulate_app(app, count, overrides, log)
    print(log.read_text(encoding="utf-8", errors="replace"), end="", flush=True)
    if code:
        raise FedveilError(f"the run did not complete: {_last_words(log)} (the whole log is {log})")


def simulate_app(app: Path, nodes: int, overrides: Sequence[str], log: Path) -> int:
    """Run any Flower app in a simulation of its own, with all off that would call home; returns 0 if it completed.

    overrides: settings of the run, as `flwr run -c` takes them.
    """
    with tempfile.TemporaryDirectory(prefix="fedveil-") as home:
        env = environment(Path(home), RAY_TMPDIR=home)
        with simulating_superlink(Path(home), log, env) as port:
            name = write_connection(Path(home), f"127.0.0.1:{port}", nodes=nodes)
            told = [part for override in overrides for part in ("-c", override)]
            started = Program([program("flwr"), "run", str(app), name, "--stream", *told], env, log)
            try:
                code = started.wait(24 * 3600.0)
            finally:
                started.stop()
            return code or _not_completed(name, env)


def _not_completed(connection: str, env: Mapping[str, str], seconds: float = 30.0) -> int:
    """0 if the last run came to its end: `flwr run` itself does not mind whether it did."""
    command = [program("flwr"), "list", connection, "--limit", "1", "--format", "json"]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done = subprocess.run(command, env=dict(env), stdout=subprocess.PIPE, text=True, check=False)
        found = re.search(r'"status": *"([^"]*)"', done.stdout)
        if found and found[1].startswith("finished"):
            return int(found[1] != "finished:completed")
        time.sleep(1.0)
    return 1


def _submit(
    run: TaskRun, app: Path, home: Path, address: str, where: Where, told: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    nodes = None if where.superlink else run.task.clients
    name = write_connection(home, address, root_certificates=where.root_certificates, nodes=nodes)
    command = [program("flwr"), "run", str(app), name, "--stream"]
    log = run.out / LOG
    for old in (OUTCOME, ERROR):
        (run.out / old).unlink(missing_ok=True)
    started = Program(command, environment(home), log)
    seen = _lines(run.out)
    end = time.monotonic() + where.patience
    try:
        while started.running and time.monotonic() < end:
            seen = _tell(run.out, seen, told)
            time.sleep(0.3)
        _tell(run.out, seen, told)
    finally:
        started.stop()
    outcome, error = run.out / OUTCOME, run.out / ERROR
    if outcome.exists():
        found: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
        return found
    if error.exists():
        raise FedveilError(error.read_text(encoding="utf-8"))
    raise FedveilError(f"the run ended without an outcome: {_last_words(log)} (the whole log is {log})")


def _lines(folder: Path) -> int:
    path = folder / ROUNDS
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _tell(folder: Path, seen: int, told: Callable[[dict[str, Any]], None]) -> int:
    path = folder / ROUNDS
    if not path.exists():
        return 0
    lines = [line for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]
    for line in lines[seen:]:
        told(json.loads(line))
    return len(lines)


def _last_words(log: Path) -> str:
    """The last exception in a log, or its last error."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))  # without colors
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    telling = raised or [line for line in lines if "ERROR" in line] or lines
    return telling[-1][:300] if telling else "it said nothing"
