"""Mutations of bytes, of JSON and of text, as Hypothesis strategies: from valid files to damaged and hostile ones."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
FORMS = ("B", "<H", ">H", "<I", ">I", "<Q", ">Q")
# Stand-ins for text that writers of JSON and TOML would not produce.
DEEP, DIGITS, EXPONENT = "@deep@", "@digits@", "@exponent@"
WRITTEN = {DEEP: "[" * 20_000 + "]" * 20_000, DIGITS: "9" * 5000, EXPONENT: "1e999"}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 2**31, -(2**31), 2**53 + 1, 2**63, 2**64, -(2**70), 10**300),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "0", "-1", "nan", "x", "../x", "/x", "a/b", "a\nb", "\x00", "\x1b[2J", "é", "\ud800", "x" * 3000),
    *([], [0], [[]], [1, 2, 3], [-1], [2**62, 2**62], ["x"], {}, {"name": "x"}, {"": 0}),
    *(DEEP, DIGITS, EXPONENT),
)


@st.composite
def position(draw: DrawFn, size: int) -> int:
    """A position in a file, often near its start or end, where headers and directories are."""
    low, high = draw(st.sampled_from(((0, min(size, 64)), (0, min(size, 512)), (0, size), (max(0, size - 96), size))))
    return draw(st.integers(low, high))


def _flip(draw: DrawFn, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        changed[min(draw(position(len(content))), len(content) - 1)] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed)


def _cut(draw: DrawFn, content: bytes) -> bytes:
    return content[: draw(position(len(content)))]


def _span(draw: DrawFn, content: bytes) -> tuple[int, int]:
    start = draw(position(len(content)))
    return start, min(len(content), start + draw(st.sampled_from((1, 2, 4, 8, 30, 100, 1000))))


def _drop(draw: DrawFn, content: bytes) -> bytes:
    start, end = _span(draw, content)
    return content[:start] + content[end:]


def _double(draw: DrawFn, content: bytes) -> bytes:
    start, end = _span(draw, content)
    return content[:end] + content[start:end] * draw(st.sampled_from((1, 2, 20))) + content[end:]


def _swap(draw: DrawFn, content: bytes) -> bytes:
    (a, b), (c, d) = sorted((_span(draw, content), _span(draw, content)))
    c, d = max(b, c), max(b, d)
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def _number(draw: DrawFn, content: bytes) -> bytes:
    form = draw(st.sampled_from(FORMS))
    number = struct.pack(form, draw(st.sampled_from(NUMBERS)) % (1 << 8 * struct.calcsize(form)))
    start = draw(position(len(content)))
    return content[:start] + number + content[start + len(number) :]


def _insert(draw: DrawFn, content: bytes) -> bytes:
    start = draw(position(len(content)))
    more = draw(
        st.sampled_from((b"\0", b"\xff" * 16, b"\0" * 600, b"\n", b"\xed\xa0\x80", b"PK\x05\x06", b"../../x\0"))
    )
    return content[:start] + more + content[start:]


DAMAGES: tuple[Callable[[DrawFn, bytes], bytes], ...] = (
    *(_flip, _flip, _number, _number),
    *(_cut, _drop, _double, _swap, _insert),
)


@st.composite
def damaged(draw: DrawFn, content: bytes, most: int = 3) -> bytes:
    """The content with up to `most` damages, sometimes none."""
    for _ in range(draw(st.integers(0, most))):
        content = draw(st.sampled_from(DAMAGES))(draw, content) if content else b"\0"
    return content


def any_of(*choices: SearchStrategy[bytes]) -> SearchStrategy[bytes]:
    """One of several ways to make a file, which may then be damaged on top."""
    made = st.one_of(*choices)
    return st.one_of(made, made.flatmap(lambda content: damaged(content, 1)))


# ---- JSON ----------------------------------------------------------------------------------------------------


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container inside a JSON value with every key of it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key, part in pairs:
        found += [(value, key), *_places(part)]
    return found


@st.composite
def odd_json(draw: DrawFn, value: Any, most: int = 2, odd: Sequence[Any] = ODD) -> Any:
    """The value with parts replaced by odd ones, removed, renamed, doubled or swapped."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(0, most))):
        places = _places(value)
        if not places:
            return draw(st.sampled_from(odd))
        container, key = draw(st.sampled_from(places))
        if not (key in container if isinstance(container, dict) else key < len(container)):
            continue
        deed = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename", "double", "swap")))
        if deed == "replace":
            container[key] = copy.deepcopy(draw(st.sampled_from(odd)))
        elif deed == "remove":
            del container[key]
        elif deed == "swap":
            other, place = draw(st.sampled_from(places))
            if (place in other) if isinstance(other, dict) else place < len(other):
                container[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(container[key])
        elif isinstance(container, list):
            container += container[key : key + 1] * draw(st.sampled_from((1, 50)))
        else:
            name = draw(st.sampled_from(("x", "", "a/b", "../x", "\n", "name", f"{key} ", f"{key}/x")))
            container[name] = container.pop(key) if deed == "rename" else container[key]
    return value


def json_text(value: Any) -> str:
    """JSON text, including what a writer would not produce: deep nesting, thousands of digits, lone surrogates."""
    text = json.dumps(value)
    for stand_in, written in WRITTEN.items():
        text = text.replace(f'"{stand_in}"', written)
    return text


def json_files(value: Any) -> SearchStrategy[bytes]:
    """JSON files like this value."""
    return any_of(odd_json(value).map(lambda odd: json_text(odd).encode()))


# ---- text ----------------------------------------------------------------------------------------------------


@st.composite
def odd_lines(draw: DrawFn, lines: Sequence[str], fillings: Sequence[str], mark: str, most: int = 3) -> str:
    """Lines of fields between marks, with fields replaced, and lines removed, doubled and swapped."""
    found = list(lines)
    for _ in range(draw(st.integers(0, most))):
        place = draw(st.integers(0, max(len(found) - 1, 0)))
        deed = draw(st.sampled_from(("field", "field", "field", "remove", "double", "swap", "insert")))
        if deed == "insert" or not found:
            found.insert(place, draw(st.sampled_from(fillings)))
        elif deed == "field":
            parts = found[place].split(mark)
            parts[draw(st.integers(0, len(parts) - 1))] = draw(st.sampled_from(fillings))
            found[place] = mark.join(parts)
        elif deed == "remove":
            del found[place]
        elif deed == "double":
            found.insert(place, found[place])
        else:
            other = draw(st.integers(0, len(found) - 1))
            found[place], found[other] = found[other], found[place]
    return draw(st.sampled_from(("\n", "\n", "\r\n", "\r"))).join(found) + "\n"
