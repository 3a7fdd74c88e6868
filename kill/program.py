"""`fedveil` that gets a signal at one of its own writes: reproducible points that no timer would hit.

`python -m kill.program SIGNAL NUMBER FOLDER ARGUMENT...` sends itself the signal just before its NUMBERth change to the
folder. A change is opening a file for writing, renaming or removing one, or making or removing a folder. With the
number 0 it sends no signal and prints the number of changes at the end.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def changes(event: str, arguments: tuple[object, ...], folder: str) -> bool:
    """Whether an audit event of Python is a change to the folder."""
    if not (event in _CHANGES or (event == "open" and _writes(arguments[2]))):
        return False
    path = arguments[0]
    return isinstance(path, str | os.PathLike) and str(Path(os.fspath(path)).absolute()).startswith(folder)


def _writes(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def main() -> None:
    """Run the command."""
    number, change, folder = int(sys.argv[1]), int(sys.argv[2]), str(Path(sys.argv[3]).absolute())
    made = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal made
        if changes(event, arguments, folder):
            made += 1
            if made == change:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)
    if not change:
        atexit.register(lambda: print(f"changes: {made}"))
    sys.argv = ["fedveil", *sys.argv[4:]]
    from fedveil.cli import main as fedveil

    fedveil()


if __name__ == "__main__":
    main()
