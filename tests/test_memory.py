"""Memory that is freed is taken again without asking the system."""

import ctypes
import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from fedveil.clients.memory import keep_freed_memory
kept = {call}
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    parts = [torch.ones(2**20) for _ in range(8)]  # 32 MB, as a chunk of clients may need
    del parts
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 8 * 2**22 // os.sysconf("SC_PAGE_SIZE")  # all that is written


def faults(call: str, **environment: str) -> tuple[str, int]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(call=call)], env={**own, **environment}, check=True, capture_output=True
    )
    kept, count = done.stdout.split()
    return kept.decode(), int(count)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="only glibc is asked")
def test_pages_are_cleared_once():
    kept, count = faults("keep_freed_memory()")
    assert kept == "True"
    assert count < 0.2 * PAGES < faults("None")[1]


def test_limits_set_by_the_user_stay():
    kept, _ = faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
