"""The one exception that users meet: a line that says what is wrong and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 1500  # characters of a message
LONGEST_QUOTE = 200  # characters of what somebody else said, inside of a message


class FedveilError(Exception):
    """A problem that the user can fix. The command line prints it as one line and exits with 2.

    The message is one printable line of bounded length, even if it quotes a file or a server.
    """

    def __init__(self, message: str) -> None:
        whole = len(message) <= LONGEST
        super().__init__(printable(message if whole else f"{message[:LONGEST]}… ({len(message):,} characters)"))


def printable(text: str) -> str:
    """The text on one line, with everything that a terminal would act upon spelled out.

    >>> printable("red\\x1b[31m\\ncat")
    'red\\\\x1b[31m cat'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def shortened(text: str, longest: int) -> str:
    """The text, cut with an ellipsis if it is longer than so many characters."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def one_line(said: BaseException | str, *, typed: bool = False) -> str:
    """Quote somebody else's error in a message of ours: the first line of what it says, printable and short.

    An exception that says nothing is quoted by its type.

    typed: put the type first. For errors out of a user's own code, where the type tells most.

    >>> one_line(RuntimeError("shapes differ\\nException raised from ..."))
    'shapes differ'
    >>> one_line(KeyError("age"), typed=True)
    "KeyError: 'age'"
    """
    first = printable(shortened(str(said).strip().partition("\n")[0].strip(), LONGEST_QUOTE))
    if isinstance(said, str | FedveilError):
        return first
    kind = type(said).__name__
    return f"{kind}: {first}" if typed and first else first or kind


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
