"""Programs that were started end with us, however we end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.errors import FedveilError
from fedveil.flower.launch import ALONE, Program, environment
from flower.deployment import until

ENDLESS = "import time; print('up', flush=True); time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a program that its parent has died")
def test_a_program_does_not_outlive_us_even_if_we_are_killed(tmp_path: Path) -> None:
    us = f"""
import sys, time
from pathlib import Path
from fedveil.flower.launch import Program
started = Program([sys.executable, "-c", {ENDLESS!r}], {{}}, Path({str(tmp_path / "log")!r}))
print(started.process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", us], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert until(lambda: (tmp_path / "log").read_text() == "up\n", 60)
        assert alive(pid)
        process.send_signal(signal.SIGKILL)
    assert until(lambda: not alive(pid), 60)


def test_a_program_is_stopped_with_its_children(tmp_path: Path) -> None:
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {ENDLESS!r}]).pid, flush=True)"
    env = environment(tmp_path)
    started = Program([sys.executable, "-c", f"{parent}; import time; time.sleep(600)"], env, tmp_path / "log")
    assert until(lambda: "up" in started.said(), 60)
    child = int(started.said().split()[0])
    started.stop()
    assert not started.running
    assert until(lambda: not alive(child), 30)


def test_what_a_simulation_starts_connects_to_nobody_else(tmp_path: Path) -> None:
    """Ray's statistics are off, and yet it asks the machine's cloud for its name when it starts."""
    program = """
import sys
reached = set()
def hook(event, given):
    if event == "socket.connect" and isinstance(given[1], tuple):
        reached.add(given[1][0])
    if event == "socket.getaddrinfo":
        reached.add(given[0])
sys.addaudithook(hook)
from ray._common.usage import usage_lib
from ray._private import services
print(usage_lib.get_cloud_from_metadata_requests(), usage_lib.usage_stats_enabled(), services.get_node_ip_address())
print(reached - {"127.0.0.1", "localhost"})
"""
    env = {**environment(tmp_path), **ALONE}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert told.stdout.splitlines() == ["unknown False 127.0.0.1", "set()"], told.stderr


def test_flower_s_programs_reach_each_other_past_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "intranet")
    program = "import requests.utils as u; print(u.should_bypass_proxies('http://127.0.0.1:9091/v1', None))"
    told = subprocess.run([sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, text=True)
    assert told.stdout == "True\n", told.stderr
    assert environment(tmp_path)["no_proxy"].endswith(",intranet")


def test_a_program_that_takes_too_long_is_named(tmp_path: Path) -> None:
    started = Program([sys.executable, "-c", ENDLESS], {}, tmp_path / "log")
    try:
        with pytest.raises(FedveilError, match=r"^python\S* did not end within 0.1 s: see "):
            started.wait(0.1)
    finally:
        started.kill()
    assert not started.running
