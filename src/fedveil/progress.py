"""Progress of long work: a bar with the time left on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, TextIO

Report = Callable[[int, int], None]  # (steps done, steps in all)
Style = Literal["bar", "lines", "none"]

_LONGEST = 40  # letters of a stage's name before a bar


@dataclass(frozen=True)
class Stage:
    """A part of long work that is announced before it starts."""

    line: str  # "training under clip:norm=1"
    kind: str  # stages of one kind take about equally long per unit of work
    work: float = 0.0  # rounds or steps; 0: takes no time


def style_for(progress: bool | None, stream: TextIO | None = None) -> Style:
    """How to show progress. None: a bar if someone is watching, else nothing; True: a bar or lines; False: nothing."""
    if progress is False:
        return "none"
    if is_terminal(stream or sys.stderr) or in_notebook():
        return "bar"
    return "lines" if progress else "none"


def is_terminal(stream: Any) -> bool:
    """Whether this stream is a terminal. Some programs have no standard error at all."""
    return bool(stream is not None and stream.isatty())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class Forecast:
    """Estimates the time left from the pace so far: of this stage, and of later stages of a kind seen before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ahead: list[Stage] = []
        self._now = Stage("", "")
        self._first: tuple[float, float] | None = None  # time and share done; a resumed stage does not start at 0
        self._pace: dict[str, float] = {}  # seconds per unit of work, by kind

    def plan(self, stages: Sequence[Stage]) -> None:
        """Announce all stages in their order."""
        self._ahead = list(stages)

    def start(self, line: str) -> None:
        """The stage with this line starts; those before it are over."""
        for index, stage in enumerate(self._ahead):
            if stage.line == line:
                self._now, self._ahead = stage, self._ahead[index + 1 :]
                break
        else:
            self._now = Stage(line, "")
        self._first = None

    def left(self, share: float) -> tuple[float, bool] | None:
        """Seconds left, and whether that includes all stages; None as long as nothing is known."""
        now = self._clock()
        if self._first is None:
            self._first = (now, share)
        since, start = self._first
        if share <= start:
            return None
        whole = (now - since) / (share - start)
        if self._now.work:
            self._pace[self._now.kind] = whole / self._now.work
        ahead = [stage for stage in self._ahead if stage.work]
        known = [stage.work * self._pace[stage.kind] for stage in ahead if stage.kind in self._pace]
        return whole * (1 - share) + sum(known), len(known) == len(ahead)


class Meter:
    """Shows stages and their progress. Close it, or use it in a `with`."""

    def __init__(self, style: Style, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.style = style
        self._stream = stream
        self._forecast = Forecast(clock)
        self._bar: Any = None
        self._note = ""  # stays beside the bar when its stage is over

    def plan(self, stages: Sequence[Stage]) -> None:
        """Announce all stages, so that the time left can include them."""
        self._forecast.plan(stages)

    def stage(self, line: str) -> None:
        """A stage starts."""
        self.close()
        self._forecast.start(line)
        self._note = ""
        if self.style == "bar":
            self._bar = _new_bar(line, self._stream)
        else:
            self.say(f"{line} …")

    def update(self, done: int, total: int, note: str = "") -> None:
        """The progress of the stage; `note` is shown beside it."""
        if self._bar is None or not total:
            return
        share = min(done / total, 1.0)
        left = self._forecast.left(share)
        time_left = f"{'' if left[1] else 'over '}{_clock_time(left[0])} left" if left else ""
        self._note = note
        self._bar.tail = ", ".join(part for part in (note, time_left) if part)
        self._bar.leave = True  # a stage that reported no progress does not stay on the screen
        self._bar.update(share - self._bar.n)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream or sys.stderr)
        elif self.style != "none":
            print(line, file=self._stream or sys.stderr, flush=True)

    def close(self) -> None:
        """The stage is over, whether or not it was completed."""
        if self._bar is not None:
            self._bar.tail = self._note
            self._bar.refresh()
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def reporting(progress: Report | bool | None, line: str) -> Iterator[Report]:
    """The function to report the progress of one stage to: the caller's own, or a meter's (see `style_for`)."""
    if callable(progress):
        yield progress
        return
    with Meter(style_for(progress)) as meter:
        meter.stage(line)
        yield meter.update


def part_of(report: Report, start: float, end: float) -> Report:
    """Report the progress of a part of the work, which takes `report` from one share to another, in thousandths."""
    return lambda done, total: report(round(1000 * (start + (end - start) * done / total)), 1000)


def _clock_time(seconds: float) -> str:
    """Minutes and seconds, and hours if there are any.

    >>> _clock_time(75.2), _clock_time(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _new_bar(line: str, stream: TextIO | None) -> Any:
    width: dict[str, Any] = {}
    if stream is None and in_notebook():
        with warnings.catch_warnings():  # without ipywidgets it warns and falls back to text, which is fine
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    else:
        from tqdm.std import tqdm

        # Some terminals do not report their size.
        width = {"dynamic_ncols": True} if _columns(stream or sys.stderr) else {"ncols": 80, "nrows": 24}

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # starts no thread
        tail = ""

        @property
        def format_dict(self) -> dict[str, Any]:
            return {**super().format_dict, "tail": self.tail}

    Bar.set_lock(threading.RLock())  # tqdm's default is for several processes, which this bar does not need
    return Bar(
        total=1.0,
        desc=textwrap.shorten(line, _LONGEST, placeholder="…") if " " in line else line[:_LONGEST],
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {tail}",
        file=stream,
        leave=False,
        miniters=0,
        **width,
    )


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # not a terminal, or not even a file
        return 0
