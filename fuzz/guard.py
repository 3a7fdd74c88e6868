"""Notices what a reader must never do: run code, start a program, write outside its folder.

It uses Python's audit events, which cannot be switched off and are raised before the action. A hook stays until its
process ends, so a guard belongs in a worker.
"""

from __future__ import annotations

import inspect
import os
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

PROGRAMS = frozenset(
    {
        *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile"),
        *("subprocess.Popen", "pty.spawn", "webbrowser.open", "ctypes.dlopen", "ctypes.call_function"),
        *("pickle.find_class", "code.__new__", "builtins.input", "os.kill"),
    }
)
# Events that change a file system, with the positions of their paths and of the folders these are relative to.
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Escaped(BaseException):
    """Prevents the action. Not an `Exception`, so that a reader does not take it for a damaged file."""


class Guard:
    """Watches one folder at a time."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """While the block runs, only this folder may be written to and nothing may be run."""
        self.seen = []
        self._folder = os.path.realpath(folder)
        try:
            yield
        finally:
            self._folder = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder is None:
            return
        if event in PROGRAMS or (event == "exec" and not _own(sys._getframe(1))):
            self._stop(f"runs code: {event} {arguments!r:.100}")
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            if (arguments[2] or 0) & WRITING:
                self._check(arguments[0], event)
        elif event in CHANGES:
            for position, relative in CHANGES[event]:
                top = arguments[relative] if relative is not None else -1
                self._check(arguments[position], event, top)

    def _check(self, path: Any, event: str, top: int = -1) -> None:
        if isinstance(path, int):  # an open file, which was checked when it was opened
            return
        shown = os.fsdecode(path)
        base = os.readlink(f"/proc/self/fd/{top}") if top >= 0 else os.getcwd()
        # Do not follow the last part: a link itself would be replaced or removed.
        parent, name = os.path.split(os.path.join(base, shown))
        whole = os.path.join(os.path.realpath(parent), name)
        if event == "open":
            whole = os.path.realpath(whole)
        if self._folder is not None and not f"{os.path.normpath(whole)}{os.sep}".startswith(self._folder + os.sep):
            self._stop(f"writes outside its folder: {event} {shown!r:.100}")

    def _stop(self, words: str) -> None:
        self.seen.append(words)
        raise Escaped(words)


def _own(frame: FrameType | None) -> bool:
    """Whether the code belongs to an installed module that is imported late, or is an annotation."""
    if frame is not None and frame.f_code.co_filename in (typing.__file__, inspect.__file__):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
