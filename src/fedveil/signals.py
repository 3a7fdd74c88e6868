"""Signals that ask a program to end: Ctrl-C (SIGINT), SIGTERM, and SIGHUP of a terminal that closes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Signaled(BaseException):
    """A signal asks this program to end. Unlike `KeyboardInterrupt`, no library takes it for something of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# Those that came. Code that compiled libraries call may make another error of the exception: this tells.
heard: list[Signaled] = []


def hear_signals() -> None:
    """Raise `Signaled` at every signal that asks to end, so that the program ends in order and says how to go on.

    For the command line's own process, never for one of the user's. What `nohup` and the like ignore stays ignored.
    """

    def stop(number: int, frame: object) -> None:
        heard.append(Signaled(number))
        raise heard[-1]

    for number in STOPPING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, stop)


def exit_code(error: BaseException) -> int:
    """What the program ends with after an interrupt: 128 and the number of the signal."""
    return 128 + (error.number if isinstance(error, Signaled) else signal.SIGINT)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that start here do not hear what a terminal tells all of its own: the first one ends the others."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
