"""What a run shows: stages and progress on standard error, results on standard output."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedveil.errors import printable
from fedveil.progress import Meter, style_for
from fedveil.signals import Signaled, exit_code
from fedveil.tasks.measures import measure

if TYPE_CHECKING:
    from fedveil.federation.observers import Watch
    from fedveil.federation.run import Run

FAILED = 3  # the exit code of a finding that --fail-if names


class Stopped(Exception):
    """Ctrl-C or another signal, with the command that continues the run."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code


class Display:
    """Shows the progress of one run; nothing if `quiet`.

    The first stage of a resumed run appears only after its checkpoint was accepted, so that a refusal is one line.
    """

    def __init__(self, *, quiet: bool = False, resumes: bool = False) -> None:
        self._held: list[str] | None = [] if resumes else None
        self._meter = Meter("none" if quiet else style_for(True))

    def stage(self, line: str) -> None:
        """A stage starts."""
        if self._held is not None and not self._held:
            self._held.append(line)
            return
        self.release()
        self._meter.stage(line)

    def release(self) -> None:
        """Show the line that was held back."""
        held, self._held = self._held or [], None
        for line in held:
            self._meter.stage(line)

    def watch(self) -> Watch:
        """What a run reports its progress to."""
        from fedveil.federation.observers import Observer, Watch
        from fedveil.federation.progress import ProgressBar

        release, meter = self.release, self._meter

        class Started(Observer):
            def on_start(self, *told: object) -> None:
                release()

        class Told(Observer):
            def on_finish(self, run: Run) -> None:
                for line in beside_the_model(run):
                    meter.say(line)

        watching = (Started(), ProgressBar(meter), Told())
        return Watch(observers=watching, plan=meter.plan, stage=self.stage, attack=self._attack)

    def _attack(self, done: int, total: int) -> None:
        self.release()  # a resumed run may have nothing left to train
        self._meter.update(done, total)

    @contextmanager
    def running(self, go_on: Callable[[], str] = lambda: "") -> Iterator[None]:
        """During this block, Ctrl-C becomes a line that says how to continue, if there is something to continue."""
        try:
            yield
        except (KeyboardInterrupt, Signaled) as error:
            command = go_on()
            raise Stopped(f"stopped; go on with: {command}" if command else "stopped", exit_code(error)) from None
        finally:
            self._meter.close()


def beside_the_model(run: Run) -> Iterator[str]:
    """What a run measured besides its model: how good other models are, and how much inputs were changed."""
    metric = run.utility.metric
    for name, value in run.utility.beside.items():
        yield f"{name}: test {metric} {measure(metric).shown(value)} (not that of the federation's model)"
    moved = [record for record in run.history if record.perturbation is not None]
    if moved:
        yield f"round {moved[-1].round}: {moved[-1].perturbation}"


class OneLine(logging.Handler):
    """Prints each record as one line on the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = getattr(record, "kind", record.levelname.lower())
        print(f"fedveil: {kind}: {printable(record.getMessage())}", file=sys.stderr)


def debugging() -> bool:
    """Whether the user wants tracebacks and the log."""
    return os.environ.get("FEDVEIL_DEBUG", "") not in ("", "0")


def set_up_logging() -> None:
    """Show fedveil's warnings as single lines; those of other libraries only when debugging."""
    logger = logging.getLogger("fedveil")
    logger.setLevel(logging.INFO if debugging() else logging.WARNING)
    if not any(isinstance(handler, OneLine) for handler in logger.handlers):
        logger.addHandler(OneLine())
        logger.propagate = False
    if not debugging():
        warnings.filterwarnings("ignore")
