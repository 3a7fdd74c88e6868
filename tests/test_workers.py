"""Worker processes: order, ticks, errors, what travels, and that none is left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedveil import fork_server
from fedveil.errors import FedveilError
from fedveil.signals import STOPPING
from fedveil.tree import Tree
from fedveil.workers import Lodged, Workers, cores, lodged_value, pack, tick
from waiting import gone, wait_for


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


def slow_first(job: int) -> tuple[int, int, int]:
    if job == 0:
        time.sleep(0.3)  # long enough, mostly, for the others to be done before
    return job, os.getpid(), torch.get_num_threads()


def ticking(job: int) -> None:
    for _ in range(job):
        tick()


def read_twice(job: Lodged) -> bool:
    return lodged_value(job) is lodged_value(job)


def failing(job: int) -> None:
    raise FedveilError(f"job {job} is refused")


def dying(job: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nothing(job: None) -> None:
    pass


def test_processes_that_were_started_before_do_the_jobs_and_one_that_died_is_told() -> None:
    with Workers(1) as workers:
        workers.start(nothing)
        assert workers._pool is not None
        before = set(workers._pool._processes)
        workers.start(dying)  # type: ignore[arg-type]  # they run already
        ((_, process, _),) = workers.map(slow_first, [1])
        assert {process} == before
    with Workers(1) as workers:
        workers.start(dying)  # type: ignore[arg-type]
        with pytest.raises(FedveilError, match="a worker process ended before"):
            list(workers.map(slow_first, [1]))


def test_results_come_in_the_order_of_the_jobs_from_single_threaded_processes(pool: Workers) -> None:
    found = list(pool.map(slow_first, range(6)))
    assert [job for job, _, _ in found] == list(range(6))
    assert os.getpid() not in {process for _, process, _ in found}
    assert {threads for _, _, threads in found} == {1}


def test_every_tick_is_told_once(pool: Workers) -> None:
    told: list[int] = []
    list(pool.map(ticking, [3, 4], lambda: told.append(1)))
    assert len(told) == 7
    tick()  # here it does nothing
    assert len(told) == 7


def test_a_shared_value_is_read_once_and_equal_values_have_one_place(pool: Workers) -> None:
    place = pool.lodge({"weights": torch.arange(5)})
    assert place == pool.lodge({"weights": torch.arange(5)})
    assert place != pool.lodge({"weights": torch.arange(6)})
    assert list(pool.map(read_twice, [place])) == [True]


def test_what_a_worker_raises_is_raised_here() -> None:
    with Workers(1) as workers, pytest.raises(FedveilError, match="job 3 is refused"):
        list(workers.map(failing, [3, 4]))


def test_a_worker_that_dies_is_told_in_one_line() -> None:
    with Workers(1) as workers, pytest.raises(FedveilError, match="a worker process ended before"):
        list(workers.map(dying, [0]))


def test_nothing_is_left_behind() -> None:
    with Workers(1) as workers:
        process = next(iter(workers.map(slow_first, [1])))[1]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


KILLED = """
import os, time
from fedveil.workers import Workers, lodged_value

def job(place):
    assert len(lodged_value(place)) == 1000
    print(os.getpid(), os.getppid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    pool = Workers(1)
    list(pool.map(job, [pool.lodge(["the data of a client"] * 1000)]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_of_a_killed_process_neither_workers_nor_data_stay(tmp_path: Path, number: int) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    with tempfile.TemporaryDirectory() as name:  # short, so that the server's socket may lie in it
        given, temporary = {**os.environ, "TMPDIR": name}, Path(name)
        with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, env=given) as parent:
            assert parent.stdout is not None
            worker, server = map(int, parent.stdout.readline().split())
            assert server != parent.pid or not fork_server._has_server()
            assert files_with(b"the data of a client", temporary, Path("/dev/shm")) == []  # also meanwhile
            parent.send_signal(number)
            parent.wait()
            wait_for(lambda: gone(worker) and gone(server))
        assert files_with(b"", temporary) == []
    assert files_with(b"the data of a client", Path("/dev/shm")) == []


def test_where_a_socket_has_no_place_workers_are_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert fork_server.context().get_start_method() == "spawn"
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert fork_server._has_server() == (sys.platform != "darwin" and os.name == "posix")


def files_with(content: bytes, *folders: Path) -> list[Path]:
    found = []
    for path in (path for folder in folders for path in folder.rglob("*")):
        with contextlib.suppress(OSError):  # gone by now, or no file
            if content in path.read_bytes():
                found.append(path)
    return found


def test_a_pool_that_has_started_takes_more_values_and_starts_anew_after_its_end(pool: Workers) -> None:
    for value in (1, 2):
        place = pool.lodge(torch.full((1000,), value))
        assert list(pool.map(sum_of, [place, place])) == [1000 * value] * 2
    with Workers(1) as own:
        assert list(own.map(sum_of, [own.lodge(torch.ones(3))])) == [3]
        own.close()
        assert list(own.map(sum_of, [own.lodge(torch.ones(4))])) == [4]


def sum_of(place: Lodged) -> int:
    return int(lodged_value(place).sum())


def test_of_a_server_that_is_still_importing_nothing_stays() -> None:
    script = (
        "from fedveil.fork_server import start; start(); from multiprocessing.forkserver import _forkserver as own; "
    )
    for end in ("import os; os._exit(0)", "from fedveil.fork_server import stop; stop()"):
        command = [sys.executable, "-c", f"{script} print(own._forkserver_pid, flush=True); {end}"]
        server = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        wait_for(lambda server=server: gone(server))  # type: ignore[misc]


def test_the_server_runs_one_thread_and_workers_find_torch_imported(pool: Workers) -> None:
    ((server, threads, imported),) = pool.map(origin, [0])
    assert imported
    if Path(f"/proc/{server}/task").exists():
        assert threads == 1


def origin(job: int) -> tuple[int, int, bool]:
    server = os.getppid()
    tasks = Path(f"/proc/{server}/task")
    return (
        server,
        len(list(tasks.iterdir())) if tasks.exists() else 0,
        "fedveil.federation.chunk_workers" in sys.modules,
    )


def test_after_the_end_of_the_server_a_new_pool_works() -> None:
    for _ in range(2):
        with Workers(1) as workers:
            assert [job for job, _, _ in workers.map(slow_first, [1])] == [1]
        fork_server.stop()


def test_where_there_is_no_server_workers_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_has_server", lambda: False)
    fork_server.start()
    with Workers(1) as workers:
        ((parent, threads, _),) = workers.map(spawned_by, [0])
    assert (parent, threads) == (os.getpid(), 1)


def spawned_by(job: int) -> tuple[int, int, int]:
    return os.getppid(), torch.get_num_threads(), job


def test_workers_have_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server is older than it."""
    monkeypatch.setenv("FEDVEIL_TRIED", "first")
    for value in ("first", "second", None):
        monkeypatch.setenv("FEDVEIL_TRIED", str(value))
        if value is None:
            monkeypatch.delenv("FEDVEIL_TRIED")
        with Workers(1) as workers:
            assert list(workers.map(os.getenv, ["FEDVEIL_TRIED"])) == [value]


def test_what_workers_log_is_shown_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedveil"), Workers(1) as workers:
        list(workers.map(logging_job, ["one", "two"]))
    told = [(record.getMessage(), getattr(record, "kind", None)) for record in caplog.records]
    assert told == [("job one", None), ("note on one", "note"), ("job two", None), ("note on two", "note")]


def logging_job(job: str) -> None:
    log = logging.getLogger("fedveil")
    log.info("job %s", job)
    log.warning("note on %s", job, extra={"kind": "note"})
    log.debug("not asked for")


UNGUARDED = """
from fedveil import fork_server
from fedveil.errors import FedveilError
from fedveil.workers import Workers

try:
    with Workers(1) as workers:
        print(list(workers.map(abs, [-1])))
except FedveilError as error:
    print("refused:", error)
"""


def test_a_script_without_a_main_part_is_told_and_one_without_a_file_works(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    given: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    of_file = subprocess.run([sys.executable, "script.py"], **given)
    assert "refused: a worker process ended before" in of_file.stdout
    assert "if __name__" in of_file.stdout
    typed = subprocess.run([sys.executable, "-c", UNGUARDED], **given)  # as in a notebook
    assert typed.stdout == "[1]\n"


@pytest.mark.parametrize("number", STOPPING)
def test_workers_leave_it_to_the_first_process_to_hear_a_signal(number: int) -> None:
    with Workers(1) as workers:
        assert list(workers.map(signals_itself, [number])) == ["still here"]


def signals_itself(number: int) -> str:
    os.kill(os.getpid(), number)
    return "still here"


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(FedveilError, match="1 or more, not 0"):
        Workers(0)
    assert cores() >= 1


def test_what_cannot_travel_is_told_in_one_line() -> None:
    with pytest.raises(FedveilError, match=r"top level of a module, or use one process \(workers=1\)") as caught:
        pack(lambda: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])
def test_tensors_travel_as_they_are(dtype: torch.dtype) -> None:
    sent = torch.arange(12).reshape(3, 4).to(dtype)
    for tensor in (sent, sent.T, sent[1], sent[1, 1], sent[:0]):
        found = pickle.loads(pack(tensor))
        assert torch.equal(found, tensor)
        assert found.dtype == dtype


def test_a_view_travels_without_what_it_was_cut_from() -> None:
    assert len(pack(torch.zeros(1_000_000)[:10])) < 1000


def test_one_copy_for_all_stays_one() -> None:
    found = pickle.loads(pack(Tree.expand({"w": torch.arange(6.0).reshape(2, 3)}, 1000)))
    assert found.repeated
    assert torch.equal(found["w"], torch.arange(6.0).reshape(1, 2, 3).expand(1000, 2, 3))


def test_a_model_keeps_its_ties() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    found = pickle.loads(pack(model))
    assert found[1].weight is found[0].weight


def test_tensors_arrive_where_torch_puts_its_own() -> None:
    """Else a worker's kernels round otherwise than those of one process."""
    sent = [torch.rand(size) for size in (3, 1, 7, 70_000, 5)]
    arrived = pickle.loads(pack(sent))
    assert [tensor.data_ptr() % 64 for tensor in arrived] == [0] * 5
    assert all(torch.equal(one, other) for one, other in zip(sent, arrived, strict=True))
