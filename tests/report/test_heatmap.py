"""The picture of who holds what: legible for a few clients and for many, and true."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.report.clients import write_picture
from fedveil.report.heatmap import BARS, LEVELS, MOST_ROWS, heat_map
from fedveil.tasks.client_labels import ClientLabels

from .page_check import browser, inspect
from .report_samples import HOSTILE, held

CLASSES = [f"class {number}" for number in range(10)]


def draw(holdings: ClientLabels, width: float = 720) -> ElementTree.Element:
    """The picture, read back as XML: what is not well-formed raises."""
    return ElementTree.fromstring(heat_map(holdings, title="Who <holds> what", width=width))


def texts(picture: ElementTree.Element, style: str) -> list[str]:
    return [text.text or "" for text in picture.iter("text") if (text.get("class") or "").startswith(style)]


def cells(picture: ElementTree.Element) -> list[tuple[float, float, float, float, float]]:
    """Left, right, top, height and shade of every piece."""
    heat = next(picture.iter("g"))  # the legend comes after
    return [
        (*map(float, numbers), float(path.get("fill-opacity", "")))  # type: ignore[misc]
        for path in heat
        for x, y, end, high in re.findall(r"M(\S+) (\S+)H([\d.]+)v([\d.]+)H", path.get("d", ""))
        for numbers in [(x, end, y, high)]
    ]


def test_few_clients_have_their_numbers_and_counts() -> None:
    few = held(4, CLASSES, 0.5)
    picture = draw(few)
    expected = [f"{n:,}" for n in few.sizes] + [f"{n:,}" for row in few.counts for n in row]
    assert texts(picture, "count") == expected
    assert texts(picture, "tick middle") == ["0", "1", "2", "3"]
    assert set(CLASSES) <= set(texts(picture, "tick end"))
    assert "Client; a row for each label" in texts(picture, "axis-title")


def test_a_shade_is_a_share() -> None:
    found = cells(draw(ClientLabels(labels=["a", "b"], sizes=[10, 40], counts=[[10, 0], [20, 20]])))
    shades = [shade for *_, shade in sorted(found)]
    assert len(shades) == 3  # what a client does not hold stays blank
    assert shades[0] == 1
    assert shades[1] == shades[2] == round(LEVELS * 0.5**0.4) / LEVELS


def test_bars_are_the_sizes() -> None:
    picture = draw(ClientLabels(labels=["a"], sizes=[10, 40], counts=[[10], [40]]))
    (bars,) = [path for path in picture.iter("path") if path.get("class") == "amount"]
    assert [float(high) for high in re.findall(r"v-([\d.]+)H", bars.get("d", ""))] == [BARS / 4, BARS]


def test_many_clients_are_sorted_by_their_most_frequent_label() -> None:
    of = [i * 7 % 10 for i in range(480)]  # one class each, out of order
    many = ClientLabels(labels=CLASSES, sizes=[20] * 480, counts=[[20 * (i == c) for c in range(10)] for i in of])
    picture = draw(many)
    axis = " ".join(texts(picture, "axis-title"))
    assert "480 clients, sorted by their most frequent label, 4 to a column; a row for each label" in axis
    assert "Examples per client (mean)" in texts(picture, "axis-title")
    assert texts(picture, "count") == []
    found = sorted(cells(picture))
    assert len(found) == 10  # a piece for each class, one after the other
    assert [shade for *_, shade in found] == [1.0] * 10
    assert [top for _, _, top, _, _ in found] == sorted({top for _, _, top, _, _ in found})
    assert all(a[1] == b[0] for a, b in pairwise(found))


def test_many_labels_share_rows() -> None:
    count = 3 * MOST_ROWS
    picture = draw(ClientLabels(labels=[str(i) for i in range(count)], sizes=[count], counts=[[1] * count]))
    assert any("3 labels to a row" in text for text in texts(picture, "axis-title"))
    assert len({top for _, _, top, _, _ in cells(picture)}) == MOST_ROWS


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 700), st.integers(1, 130), st.sampled_from([350.0, 720.0]), st.integers(1, 10**6))
def test_everything_is_inside_and_small(clients: int, labels: int, width: float, size: int) -> None:
    counts = [[size if (c + i) % 3 else 0 for c in range(labels)] for i in range(clients)]
    sizes = [max(1, sum(row)) for row in counts]
    drawn = heat_map(ClientLabels(labels=["x" * 40] * labels, sizes=sizes, counts=counts), title="", width=width)
    assert len(drawn) < 500_000
    picture = ElementTree.fromstring(drawn)
    _, _, wide, high = map(float, picture.get("viewBox", "").split())
    assert wide == width
    for left, right, top, down, _ in cells(picture):
        assert 0 <= left < right <= width + 1
        assert 0 < top < top + down < high
    for text in picture.iter("text"):
        assert 0 <= float(text.get("x", "")) <= width
        assert 0 < float(text.get("y", "")) < high


def test_it_is_accessible_and_escaped() -> None:
    picture = draw(ClientLabels(labels=[HOSTILE], sizes=[2, 3], counts=[[2], [3]]))
    assert picture.get("role") == "img"
    assert picture.findtext("title") == "Who <holds> what"
    assert (picture.findtext("desc") or "").startswith("2 clients with 2 to 3 examples; a client has 1.0 of 1 labels")


SIZES = [(1, 2), (4, 10), (50, 10), (500, 10), (4, 100), (500, 100)]


@pytest.mark.skipif(browser() is None, reason="needs Chromium or Chrome on the PATH to look at the page")
@pytest.mark.parametrize("clients, labels", SIZES)
def test_nothing_is_cut_off_or_overlaps(clients: int, labels: int, tmp_path: Path) -> None:
    names = [f"label {number} with a long name" for number in range(labels)]
    write_picture(held(clients, names, 0.3), "a set", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert inspect(page, tmp_path, dark=clients == 4)[0] == []


def test_files(tmp_path: Path) -> None:
    few = held(3, CLASSES, 1.0)
    write_picture(few, "<set>", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;set&gt;" in page
    assert not re.search(r"<script|<link|url\(|@import", page)
    write_picture(few, "set", tmp_path / "alone.svg")
    alone = ElementTree.parse(tmp_path / "alone.svg").getroot()
    assert alone.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in (alone.findtext("{*}style") or "")
    with pytest.raises(FedveilError, match=r"must end in \.html or \.svg"):
        write_picture(few, "set", tmp_path / "page.pdf")
