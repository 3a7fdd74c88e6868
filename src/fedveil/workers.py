"""Worker processes of one thread each, forked from a clean server. On small models two beat two threads of one process.

Draws do not depend on which worker makes them, nor on how many there are: every draw comes from a
client's own stream, and results are taken in the order of the jobs.
"""

from __future__ import annotations

import hashlib
import io
import logging
import logging.handlers
import mmap
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil import fork_server
from fedveil.errors import FedveilError, one_line
from fedveil.fork_server import cores
from fedveil.memory import keep_freed_memory
from fedveil.signals import deaf_children
from fedveil.tensors import own_memory

log = logging.getLogger("fedveil")

WORTH_SECONDS = 8.0  # starting processes takes a few seconds: shorter work runs in one
POLL_SECONDS = 0.2  # how often ticks are read while jobs run


class Workers:
    """A pool of processes. It starts with the first job and may serve several runs, which then find it warm.

    >>> with Workers(2) as workers:  # doctest: +SKIP
    ...     run = fedveil.federate(task, "spm", settings, workers=workers)

    A script that uses workers needs its main part under `if __name__ == "__main__":`, because every worker imports it.
    """

    def __init__(self, count: int, *, least_seconds: float = 0.0) -> None:
        """A pool of so many processes, used for work that is estimated to take at least `least_seconds`."""
        if count < 1:
            raise FedveilError(f"the number of worker processes must be 1 or more, not {count}")
        self.count = count
        self.least_seconds = least_seconds
        self._shelf: _Shelf | None = None
        self._lodged: dict[bytes, Lodged] = {}  # by the hash of what is there
        self._pool: ProcessPoolExecutor | None = None
        self._ticks: Any = None
        self._lines: Any = None  # what workers log

    @classmethod
    def automatic(cls) -> Self:
        """One process for each core, for work that is worth the seconds in which they start."""
        return cls(cores(), least_seconds=WORTH_SECONDS)

    @classmethod
    def of(cls, text: str) -> Self:
        """The pool that "auto" or a number stands for."""
        if text == "auto":
            return cls.automatic()
        if not text.isdecimal():
            raise FedveilError(f"workers must be 'auto' or a number of processes, not '{text}'")
        return cls(int(text))

    @property
    def forced(self) -> bool:
        """Whether several processes were asked for, whatever the work."""
        return self.count > 1 and not self.least_seconds

    def worth(self, seconds: Callable[[], float]) -> bool:
        """Whether to use several processes for work that is estimated to take so long in one."""
        return self.count > 1 and (self.forced or seconds() >= self.least_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def lodge(self, value: Any) -> Lodged:
        """Put a value, such as a task, where every worker reads it once; equal values are stored once.

        No other program sees it, and it is gone with the processes, however they end.
        """
        content = pack(value)
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in self._lodged:
            self._lodged[key] = self._the_shelf().put(content, key)
        return self._lodged[key]

    def start(self, function: Callable[[None], None]) -> None:
        """Start the processes now, for jobs that come soon, with what the module of this function imports.

        The function does nothing: it is what each process runs first.
        """
        if self._pool is None:
            content, pool = pack((function, None)), self._started()
            with deaf_children():
                for _ in range(self.count):
                    pool.submit(_call, content)

    def map(
        self, function: Callable[[Any], Any], jobs: Iterable[Any], on_tick: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """The function's results for all jobs, in their order. `on_tick` is called here once for each `tick` there.

        The function must be one of a module's top level. What it raises is raised here, and the other jobs end.
        """
        pool = self._started()
        futures: list[Future[bytes]] = []
        try:
            for job in jobs:
                content = pack((function, job))
                with deaf_children():  # any job may start a process
                    futures.append(pool.submit(_call, content))
            for future in futures:
                while not wait([future], POLL_SECONDS, FIRST_COMPLETED).done:
                    self._tell(on_tick)
                self._tell(on_tick)
                yield pickle.loads(future.result())
        except BrokenProcessPool:
            self.close()
            raise FedveilError(
                "a worker process ended before its work was done, perhaps for lack of memory: use fewer workers; a "
                "script that uses workers needs its main part under 'if __name__ == \"__main__\":'"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes at once, whatever they are doing."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            for process in processes:
                process.kill()  # before the pool is shut down, which they would complain about
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.join()
            self._pool = None
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
        self._lodged.clear()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = fork_server.context()
            with deaf_children():
                self._ticks = context.Value("q", 0)  # starts Python's resource tracker, which lets signals in again
            with deaf_children():
                self._lines = context.SimpleQueue()
                given = _Given(self._ticks, self._lines, log.getEffectiveLevel(), self._the_shelf(), dict(os.environ))
                self._pool = ProcessPoolExecutor(self.count, context, _start, (given,))
        return self._pool

    def _the_shelf(self) -> _Shelf:
        if self._shelf is None:
            self._shelf = _Shelf(_nameless_memory())
        return self._shelf

    def _tell(self, on_tick: Callable[[], None] | None) -> None:
        with self._ticks.get_lock():
            count, self._ticks.value = self._ticks.value, 0
        for _ in range(count if on_tick else 0):
            assert on_tick is not None
            on_tick()
        while not self._lines.empty():
            record = self._lines.get()
            logging.getLogger(record.name).handle(record)


def opened(workers: int | Workers) -> AbstractContextManager[Workers]:
    """A pool of so many processes that ends with the block, or a pool that its owner ends."""
    return nullcontext(workers) if isinstance(workers, Workers) else Workers(workers)


# ---- values that all workers read -------------------------------------------------------------------


@dataclass(frozen=True)
class Lodged:
    """Where a value lies that all workers read."""

    key: bytes  # a hash of the value
    start: int
    size: int


class _Shelf:
    """Memory without a name, one value behind the other. Workers get it when they start; it may be filled later."""

    def __init__(self, file: int) -> None:
        self._file = open(file, "r+b")  # noqa: SIM115 (closed with the pool)
        self._end = 0

    def put(self, content: bytes, key: bytes) -> Lodged:
        where = Lodged(key, self._end, len(content))
        self._file.seek(where.start)
        self._file.write(content)
        self._file.flush()
        self._end += len(content)
        return where

    def get(self, where: Lodged) -> Any:
        end = where.start + where.size
        with (
            mmap.mmap(self._file.fileno(), end, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
            view[where.start : end] as content,
        ):
            return pickle.loads(content)

    def close(self) -> None:
        self._file.close()

    def __reduce__(self) -> Any:
        return _shelf, (multiprocessing.reduction.DupFd(self._file.fileno()),)  # for a process that is being started


def _shelf(file: Any) -> _Shelf:
    return _Shelf(file.detach())


def _nameless_memory() -> int:
    """A file of clients' data that no folder lists: nothing of it is left, also when all processes are killed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedveil")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# ---- inside a worker ---------------------------------------------------------------------------------


_ticks: list[Any] = []
_shelves: list[_Shelf] = []
_values: dict[Lodged, Any] = {}


def tick() -> None:
    """Tell the process that waits that a step is done. Does nothing outside of a worker."""
    if _ticks:
        with _ticks[0].get_lock():
            _ticks[0].value += 1


def lodged_value(where: Lodged) -> Any:
    """The value that was put there with `Workers.lodge`; read once by each worker."""
    if where not in _values:
        _values[where] = _shelves[0].get(where)
    return _values[where]


@dataclass(frozen=True)
class _Given:
    """What a worker gets when it starts."""

    ticks: Any
    lines: Any
    level: int  # of what is logged
    shelf: _Shelf
    environment: dict[str, str]


class _Told(logging.handlers.QueueHandler):
    """Sends what a worker logs to the process that waits, which shows it as its own.

    A pipe takes a line of the log whole or not at all, so none is cut short where a worker dies.
    """

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.put(record)  # type: ignore[attr-defined]


def _start(given: _Given) -> None:
    if dict(os.environ) != given.environment:  # the server that this process was forked from may be older
        os.environ.clear()
        os.environ.update(given.environment)
    if "fork" in multiprocessing.get_all_start_methods():
        # A lock that a library makes here has no name then, which would outlive a process that is killed.
        multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    keep_freed_memory()
    log.handlers, log.propagate = [_Told(given.lines)], False
    log.setLevel(given.level)
    _ticks.append(given.ticks)
    _shelves.append(given.shelf)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _call(content: bytes) -> bytes:
    function, job = pickle.loads(content)
    return pack(function(job))


# ---- what travels ------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """A value as bytes that only this program's own processes read. Tensors are cut to what they show."""
    buffer = io.BytesIO()
    try:
        _Packer(buffer, protocol=5).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = one_line(error)
        raise FedveilError(
            f"worker processes need models, losses and defenses that can be sent to them ({reason}): define them at "
            "the top level of a module, or use one process (workers=1)"
        ) from None
    return buffer.getvalue()


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.dtype == torch.bfloat16:
            return NotImplemented
        # One copy that is expanded over an axis (weights that all clients share) stays one copy.
        if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
            one = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
            return _expanded, (one, tuple(value.shape))
        return _from_numpy, (value.detach().contiguous().numpy(),)


def _from_numpy(array: NDArray[Any]) -> Tensor:
    return own_memory(torch.from_numpy(array))  # a worker computes to the last bit what one process would


def _expanded(one: Tensor, shape: tuple[int, ...]) -> Tensor:
    return one.expand(shape)
