"""The one exception a user meets: a line that says what is wrong and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 1500  # letters of a message


class FedveilError(Exception):
    """Something the user can put right. The command line prints it as one line and exits with 2.

    Whatever a file or a server put into it, the message is one printable line of bounded length.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(text: str) -> str:
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} letters)")


def printable(text: str) -> str:
    """The text on one line, with everything that a terminal would act upon spelled out. For names out of files.

    >>> printable("red\\x1b[31m\\ncat")
    'red\\\\x1b[31m cat'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in text)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> FedveilError:
    """The error for a name that is not registered, with the nearest right one.

    >>> str(unknown_name("defense", "gradient-dropuot", ["clip", "gradient-dropout"]))
    "unknown defense 'gradient-dropuot': did you mean 'gradient-dropout'? There are clip, gradient-dropout"
    """
    names = sorted(known)
    small = {each.casefold(): each for each in names}
    near = difflib.get_close_matches(name.casefold(), small, n=1, cutoff=0.5)
    hint = f"did you mean '{small[near[0]]}'? There are" if near else "there are"
    return FedveilError(f"unknown {kind} '{name}': {hint} {', '.join(names) or 'none'}")
