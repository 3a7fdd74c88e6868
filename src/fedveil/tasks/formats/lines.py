"""Text files: lines, and tables with columns separated by tabs. UTF-8, plain or gzipped."""

from __future__ import annotations

from pathlib import Path

from fedveil.errors import FedveilError
from fedveil.tasks.formats.idx import maybe_gzipped

LIMIT = 2**28  # bytes; WikiText-2, the largest set here, has 11 MB


def read_text(path: Path, limit: int = LIMIT) -> str:
    """What a file holds, if it is text: never empty."""
    content = _content(path, limit)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FedveilError(
            f"{path}: line {line} is not UTF-8 text ({error.reason}): save it as UTF-8, or get it again"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise FedveilError(f"{path}: line {line} holds a zero byte, so it is not text")
    if not text:
        raise FedveilError(f"{path}: is empty")
    return text


def read_lines(path: Path, limit: int = LIMIT) -> list[str]:
    """The lines of a file without their ends (`\\n` or `\\r\\n`); at least one, and nothing that is not text."""
    text = read_text(path, limit)
    # Not `splitlines`, which also splits at characters that occur inside of sentences.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not lines[-1]:
        lines.pop()
    return lines


def read_table(path: Path, columns: int) -> list[tuple[str, ...]]:
    """The rows of a file with this many columns, separated by single tabs. Quotes have no special meaning."""
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        row = tuple(line.split("\t"))
        if len(row) != columns:
            found = f"{len(row)} column{'s' * (len(row) != 1)}"
            raise FedveilError(f"{path}: line {number} has {found}, expected {columns} separated by tabs")
        rows.append(row)
    return rows


def read_class(path: Path, number: int, value: str, classes: int) -> int:
    """A class number from a line of a file."""
    if value.isascii() and value.isdigit() and len(value) <= 9 and int(value) < classes:
        return int(value)
    raise FedveilError(f"{path}: line {number} has the label {value!r:.40}, expected 0 to {classes - 1}")


def _content(path: Path, limit: int) -> bytes:
    """The bytes of a file, unpacked if its content is gzipped, never more than the limit."""
    with maybe_gzipped(path) as (file, room):
        # Ask for no more than the file can hold, because `read` allocates as much as it is asked for.
        content = file.read(min(limit, room) + 1)
    if len(content) > limit:
        raise FedveilError(f"{path}: holds more than the {limit:,} bytes allowed")
    return content
