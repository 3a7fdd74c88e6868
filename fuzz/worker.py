"""A worker process: make a file, let the reader read it, and judge the outcome."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import re
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import hypothesis
import torch

from fedveil.errors import FedveilError
from fuzz.guard import Guard
from fuzz.reader import Files, Reader, Refused, lay_out

SLOW = 3.0  # seconds of the processor for one file; other programs do not count
LONGEST = 2000  # characters of a message that somebody would still read
KEPT = 2  # copies of the files of one fault, in one job
INSIDE = Path("a", "b", "c", "given")  # below the worker's folder, so that `../../x` is seen


@dataclass(frozen=True)
class Job:
    """Some files of one reader. The same job always makes the same files."""

    reader: Reader
    seed: int
    number: int  # among the reader's jobs
    files: int
    done: int = 0  # files read by an earlier worker, the last of which stopped it

    def hypothesis_seed(self, turn: int) -> int:
        """A different seed for every job and turn."""
        text = f"{self.seed}/{self.reader.name}/{self.number}/{turn}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Verdict:
    """The outcome for one file."""

    kind: str  # "accepted", "refused", or what the reader did wrong
    words: str = ""
    files: Path | None = None  # a copy of its input, if the reader did something wrong

    @property
    def fine(self) -> bool:
        """Whether the reader did as it should."""
        return self.kind in ("accepted", "refused")

    @property
    def fault(self) -> str:
        """Equal for all files that show the same fault: without quotes from the files."""
        return re.sub(r"""(['"]).*\1|0x\w+|[\d.,]+ (s|characters)""", "…", f"{self.kind}: {self.words}")


def work(job: Job, folder: Path, keep: Path, results: Connection) -> None:
    """Read all files of the job. Sends the number of each before it is read, then a verdict, and at the end `None`.

    folder: the worker's own, empty; keep: for the files that show a fault.
    """
    try:
        _read_all(job, folder, keep, results)
        results.send(None)
    except Exception:  # a fault of the campaign itself: those of readers are caught elsewhere
        results.send(traceback.format_exc())


def _read_all(job: Job, folder: Path, keep: Path, results: Connection) -> None:
    sys.dont_write_bytecode = True
    faulthandler.disable()  # the parent process reports crashes
    warnings.simplefilter("ignore")
    logging.disable()
    torch.manual_seed(0)  # valid files are made of random weights
    os.chdir(folder)
    guard = Guard()
    given = folder / INSIDE
    seen, turn = 0, 0
    faults: Counter[str] = Counter()

    def one(content: Files) -> None:
        nonlocal seen
        seen += 1
        if seen > job.files or seen <= job.done:
            return
        lay_out(content, given)
        results.send(seen)
        verdict = judge(job.reader, given, guard, folder)
        faults[verdict.fault] += 1
        if not verdict.fine and faults[verdict.fault] <= KEPT:
            verdict = replace(verdict, files=keep_files(given, keep, job, seen))
        results.send(verdict)

    while seen < job.files:  # Hypothesis may stop early
        settings = hypothesis.settings(
            max_examples=job.files - seen,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        hypothesis.seed(job.hypothesis_seed(turn))(settings(hypothesis.given(job.reader.files())(one)))()
        turn += 1


def keep_files(given: Path, keep: Path, job: Job, number: int) -> Path:
    """Keep a copy of what the reader was given."""
    target = keep / f"{job.reader.name}-{job.number}-{number}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(given, target, symlinks=True)
    return target


def judge(reader: Reader, given: Path, guard: Guard, top: Path) -> Verdict:
    """Let the reader read the folder under the guard, and judge what it does."""
    size = sum(path.stat().st_size for path in given.rglob("*") if path.is_file())
    start = time.process_time()
    error: BaseException | None = None
    with guard.watching(given), memory_limit(reader.memory + reader.ratio * size):
        try:
            reader.read(given)
        except BaseException as raised:  # judged below
            error = raised
    seconds = time.process_time() - start
    if guard.seen:
        return Verdict("code or write", guard.seen[0])
    left = strays(top)
    if left:
        return Verdict("code or write", f"left {left[0]} outside its folder")
    if out_of_memory(error):
        return Verdict("memory", f"more than its bound: {place(error)}")
    if seconds > SLOW:
        return Verdict("time", f"{seconds:.1f} s")
    if error is None:
        return Verdict("accepted")
    if isinstance(error, Refused):
        return Verdict("refused")
    if not isinstance(error, FedveilError):
        return Verdict("exception", place(error))
    message = str(error).replace(str(given), "")
    if not message.isprintable() or not message.strip():
        return Verdict("message", f"not one printable line: {message!r:.200} {place(error)}")
    if len(message) > LONGEST:
        return Verdict("message", f"{len(message):,} characters: {message[:150]!r} {place(error)}")
    return Verdict("refused")


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Let allocations fail beyond this many bytes more than are in use now."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, even if the reader raised another error because of it."""
    while error is not None:
        if isinstance(error, MemoryError) and "ast.py" not in place(error):  # Python's parser means its stack
            return True
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's words
            return True
        error = error.__context__
    return False


def strays(top: Path) -> list[str]:
    """Files in the worker's folder outside of the given one."""
    found = []
    for depth in range(len(INSIDE.parts)):
        folder = top.joinpath(*INSIDE.parts[:depth])
        found += [str(path) for path in folder.iterdir() if path.name != INSIDE.parts[depth]]
    return found


def place(error: BaseException | None) -> str:
    """The error and where it was raised, in one line that is equal for equal faults."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "fedveil" in frame.filename]
    last = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:150]!r} at {' > '.join([*where[-2:], last])}"
