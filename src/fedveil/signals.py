"""Signals that ask a program to end: Ctrl-C (SIGINT), SIGTERM, and SIGHUP when its terminal closes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Signaled(BaseException):
    """A signal asks this program to end. Unlike `KeyboardInterrupt`, no library handles it as its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# All that arrived. Compiled libraries may turn an exception from a callback into another error; this list still tells.
heard: list[Signaled] = []


def hear_signals() -> None:
    """Raise `Signaled` at every signal that asks to end, so that the program can clean up and say how to resume.

    For the command line's own process, never for a user's program. A signal that `nohup` and the like ignore stays
    ignored.
    """

    def stop(number: int, frame: object) -> None:
        heard.append(Signaled(number))
        raise heard[-1]

    for number in STOPPING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, stop)


def exit_code(error: BaseException) -> int:
    """The exit code after an interrupt: 128 plus the number of the signal."""
    return 128 + (error.number if isinstance(error, Signaled) else signal.SIGINT)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Child processes that start in this block ignore the terminal's signals: their parent stops them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
