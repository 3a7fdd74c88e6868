"""The page of a comparison, in a real browser where there is one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedveil.report.frontier import render_frontier
from report.page_check import browser, inspect

from .test_compare import made, point

POINTS = [
    *(point(0.9 - 0.02 * step, 0.9 - 0.2 * step, family="gaussian-noise", naive=0.3) for step in range(5)),
    *(point(0.88 - 0.1 * step, 0.95 - 0.1 * step, family="gradient-dropout+clip:norm=2") for step in range(5)),
    point(0.4, 0.02, family="<b>own</b>"),
]


def page(*, pictures: bool = True) -> str:
    shown = {
        name: np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32) for name in ("originals", "undefended")
    }
    shown |= {f"point {place}": shown["originals"] for place in range(len(POINTS))}
    return render_frontier(made(*POINTS), shown if pictures else {})


def test_every_point_can_be_reached_and_shows_what_is_behind_it() -> None:
    found = page()
    assert "<script" not in found
    assert "<b>own</b>" not in found
    for number in range(len(POINTS) + 1):
        assert len(re.findall(rf'<button type="button" class="spot s{number}"', found)) == 2  # wide and narrow
        assert f'class="card c{number}"' in found
        assert f".frontier:has(.s{number}:hover) .c{number}" in found
        assert f".p{number} {{ background-image: url(data:image/png;base64," in found
    assert found.count('class="front"') == 2
    assert found.count('class="limit"') == 4  # floor and ceiling in both charts


def test_without_pictures_it_is_still_a_page() -> None:
    found = page(pictures=False)
    assert "background-image" not in found
    assert found.count('class="card c') == len(POINTS) + 1


@pytest.mark.skipif(browser() is None, reason="needs Chromium or Chrome on the PATH")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_cut_off_or_unreadable(dark: bool, tmp_path: Path) -> None:
    findings, _ = inspect(page(), tmp_path, dark=dark)
    assert findings == []
