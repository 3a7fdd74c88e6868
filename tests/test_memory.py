"""Memory that is freed stays with the process, where the process is ours."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fedveil.memory
from federation.small import small_task
from fedveil import FederationSettings, Guard, federate
from fedveil.memory import KEPT, LARGEST_BLOCK, MMAP_THRESHOLD, TRIM_THRESHOLD, keep_freed_memory
from fedveil.workers import Workers


@pytest.fixture
def asked(monkeypatch):
    """What the C library was asked for; it is not set in this process."""
    options = []
    library = SimpleNamespace(mallopt=lambda option, value: options.append((option, value)) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)
    keep_freed_memory.cache_clear()
    yield options
    keep_freed_memory.cache_clear()


def test_both_limits_are_set_once(asked):
    assert keep_freed_memory()
    assert keep_freed_memory()
    assert asked == [(MMAP_THRESHOLD, LARGEST_BLOCK), (TRIM_THRESHOLD, KEPT)]


def test_limits_set_by_the_user_stay(asked, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
    assert asked == []


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed_memory.cache_clear()
    assert not keep_freed_memory()
    keep_freed_memory.cache_clear()


def printed(code):
    """What a new process prints in its last line."""
    settings = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=settings, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="only glibc is asked")
def test_glibc_takes_the_limits():
    assert printed("from fedveil.memory import keep_freed_memory; print(keep_freed_memory())") == "True"


def test_a_program_that_uses_the_library_is_left_alone(asked):
    model = torch.nn.Linear(4, 2)
    Guard(model, torch.nn.functional.cross_entropy, "clip").backward(torch.ones(3, 4), torch.tensor([0, 1, 0]))
    federate(small_task(), None, FederationSettings(rounds=1))
    assert asked == []


COMMAND = """
import sys
from fedveil.cli.main import main
from fedveil.memory import keep_freed_memory
sys.argv = ["fedveil", "--version"]
try:
    main()
finally:
    print(keep_freed_memory.cache_info().currsize)
    sys.stdout.flush()
"""


def test_the_command_line_sets_them():
    assert printed(COMMAND) == "1"


def limits_were_set(_):
    return fedveil.memory.keep_freed_memory.cache_info().currsize


def test_worker_processes_set_them():
    with Workers(1) as workers:
        assert list(workers.map(limits_were_set, [None])) == [1]
