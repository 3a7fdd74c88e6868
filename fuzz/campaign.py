"""The parent process: starts workers, collects their verdicts, and handles those that crash or hang."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fuzz.reader import Reader
from fuzz.worker import INSIDE, Job, Verdict, keep_files, work

BATCH = 400  # files of one worker process
PATIENCE = 30.0  # seconds for one file, after which the reader counts as hanging
START = 300.0  # seconds within which a worker must report anything

# Workers are forks of this process, so that torch is imported only once.
_fork = multiprocessing.get_context("fork")


@dataclass
class Tally:
    """The verdicts on the files of one reader."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[Verdict]] = field(default_factory=dict)  # the files that show each fault

    @property
    def files(self) -> int:
        """Files read."""
        return self.counts.total()

    @property
    def wrong(self) -> int:
        """Files on which the reader did something wrong."""
        return self.files - self.counts["accepted"] - self.counts["refused"]


class Run:
    """One worker process on one job."""

    def __init__(self, job: Job, keep: Path) -> None:
        self.job = job
        self._keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix="fedveil-fuzz-"))
        self.heard = time.monotonic()
        self._reading = False
        self.results, theirs = _fork.Pipe(duplex=False)
        self.process: BaseProcess = _fork.Process(target=work, args=(job, self.folder, keep, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def news(self) -> list[Verdict | None]:
        """The verdicts since the last call; the last is `None` if the worker has finished."""
        found: list[Verdict | None] = []
        try:
            while self.results.poll():
                said = self.results.recv()
                if isinstance(said, str):
                    raise RuntimeError(f"the campaign itself failed:\n{said}")
                self._reading = isinstance(said, int)
                if not self._reading:
                    found.append(said)
                self.heard = time.monotonic()
        except EOFError:
            self.process.join()
            if None not in found:
                code = self.process.exitcode or 0
                words = f"signal {-code}" if code < 0 else f"the process ended with {code}"
                if not self._reading:
                    raise RuntimeError(f"a worker on {self.job.reader.name} did not begin: {words}") from None
                found.append(self._last("crash", words, len(found)))
        silent = time.monotonic() - self.heard
        if self._reading and not found and silent > PATIENCE:
            found.append(self._last("hang", f"no end after {PATIENCE:g} s", 0))
        if silent > START:
            raise RuntimeError(f"a worker on {self.job.reader.name} makes no files")
        return found

    def _last(self, kind: str, words: str, new: int) -> Verdict:
        """The verdict on the file that stopped the worker; `new`: verdicts before it that are not counted yet."""
        number = self.job.done + new + 1
        return Verdict(kind, words, keep_files(self.folder / INSIDE, self._keep, self.job, number))

    def end(self) -> None:
        """Stop the worker and remove its folder."""
        self.process.kill()
        self.process.join()
        self.results.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def jobs(readers: Sequence[Reader], files: int, seed: int) -> list[Job]:
    """Divide the files among the readers, and into jobs."""
    total = sum(reader.share for reader in readers)
    found = []
    for reader in readers:
        left = -(-files * reader.share // total)
        for number in range(-(-left // BATCH)):
            found.append(Job(reader, seed, number, min(BATCH, left - number * BATCH)))
    return found


def campaign(
    readers: Sequence[Reader],
    files: int,
    seed: int,
    keep: Path,
    workers: int = 2,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Tally]:
    """Read at least `files` files. Those that show a fault are kept in the folder `keep`."""
    tallies = {reader.name: Tally() for reader in readers}
    waiting = jobs(readers, files, seed)[::-1]
    running: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(Run(waiting.pop(), keep))
            wait([run.results for run in running], timeout=0.2)
            for run in list(running):
                if _take(run, tallies[run.job.reader.name], waiting, tell):
                    running.remove(run)
                    run.end()
    finally:
        for run in running:
            run.end()
    return tallies


def _take(run: Run, tally: Tally, waiting: list[Job], tell: Callable[[str], None]) -> bool:
    """Record the verdicts of a worker; returns whether it has ended."""
    for verdict in run.news():
        if verdict is None:
            return True
        run.job = replace(run.job, done=run.job.done + 1)
        tally.counts[verdict.kind] += 1
        if verdict.fine:
            continue
        if verdict.fault not in tally.faults:
            tell(f"{run.job.reader.name}: {verdict.kind}: {verdict.words} ({verdict.files})")
        tally.faults.setdefault(verdict.fault, []).append(verdict)
        if verdict.kind in ("crash", "hang"):
            if run.job.done < run.job.files:  # the next worker continues after the file that stopped this one
                waiting.append(run.job)
            return True
    return False
