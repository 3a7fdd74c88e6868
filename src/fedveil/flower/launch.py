"""Starts Flower's own programs, with everything off that would call home, and stops them by their process ids."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedveil.errors import FedveilError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
LOOPBACK = "127.0.0.1"
# Even with its statistics off, Ray asks the machine's cloud for its name, by plain http: that goes to a port where
# nobody listens. And it listens where other machines reach it, unless it is told what it is told on macOS.
ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "http_proxy": f"http://{LOOPBACK}:9",
    "HTTP_PROXY": f"http://{LOOPBACK}:9",
}
# On Linux the kernel asks a program to end when we have died, however that happened. Its own children watch it.
LEASH = f"""
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)})
os.execvp(sys.argv[1], sys.argv[1:])
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a Flower program: its own home, no telemetry, and our interpreter's programs first."""
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, **past_proxies(), "FLWR_HOME": str(home), "PATH": path, **more}


def past_proxies() -> dict[str, str]:
    """Flower's programs talk to each other by http, which must not go by way of a site's proxy."""
    near = ",".join([LOOPBACK, "localhost", "::1", *filter(None, [os.environ.get("no_proxy")])])
    return {"no_proxy": near, "NO_PROXY": near}


def program(name: str) -> str:
    """One of Flower's programs, beside our interpreter or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FedveilError(f"there is no program {name}: pip install 'fedveil[flower]'")
    return found


def free_port() -> int:
    """A port on the loopback that nobody has now."""
    with socket.socket() as bound:
        bound.bind((LOOPBACK, 0))
        return int(bound.getsockname()[1])


def connects(address: str, port: int) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False


class Program:
    """A program that was started, with a log; it and its children are stopped by their ids."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log, self.name = log, Path(command[0]).name
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LEASH, *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int:
        """Its exit code; longer than that is an error."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise FedveilError(f"{self.name} did not end within {seconds:g} s: see {self.log}") from None

    def kill(self) -> None:
        """End it at once, with its children."""
        self._signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self, seconds: float = 15.0) -> None:
        """Ask it to end; after a while, end it. Its session has no other processes than its own children."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def until_open(started: Program, port: int, seconds: float = 90.0) -> None:
    """Wait until a program listens."""
    end = time.monotonic() + seconds
    while not connects(LOOPBACK, port):
        if not started.running:
            raise FedveilError(f"{started.name} ended at once: see {started.log}")
        if time.monotonic() > end:
            raise FedveilError(f"nothing listens on port {port} after {seconds:g} s: see {started.log}")
        time.sleep(0.2)


@contextmanager
def simulating_superlink(home: Path, log: Path, env: Mapping[str, str]) -> Iterator[int]:
    """A SuperLink that simulates its nodes, on a free port of the loopback; it is stopped at the end."""
    port = free_port()
    command = [
        program("flower-superlink"),
        *("--simulation", "--insecure", "--host", LOOPBACK, "--port", str(port)),
        "--disable-runtime-dependency-installation",
    ]
    started = Program(command, {**env, **ALONE}, log)
    try:
        until_open(started, port)
        yield port
    finally:
        started.stop()


def write_connection(
    home: Path, address: str, *, root_certificates: Path | None = None, nodes: int | None = None
) -> str:
    """Tell `flwr run` of a SuperLink; returns the name to call it by. nodes: of a simulation."""
    lines = ["[superlink]", 'default = "fedveil"', "", "[superlink.fedveil]", f'address = "{address}"']
    if root_certificates is None:
        lines.append("insecure = true")
    else:
        lines.append(f'root-certificates = "{root_certificates}"')
    if nodes is not None:
        lines += [f"options.num-supernodes = {nodes}", "options.backend.client-resources.num-cpus = 1"]
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "fedveil"
