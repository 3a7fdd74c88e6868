"""The report in a real browser: laptop, phone, dark, paper. And proof that the check sees what is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedveil.report import render, write_report

from .page_check import FRAMES, TIMEOUT, browser, inspect, run
from .report_samples import SAMPLES, full

pytestmark = pytest.mark.skipif(browser() is None, reason="needs Chromium or Chrome on the PATH to look at the report")

A4 = (595, 842)  # points


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_nothing_is_cut_off_missing_or_unreadable(sample: str, dark: bool, tmp_path: Path) -> None:
    report = render(*SAMPLES[sample]())
    findings, facts = inspect(report, tmp_path, dark=dark)
    assert findings == []
    # The frames were really shown as meant; paper is white whatever the reader prefers.
    assert {name: fact["width"] for name, fact in facts.items()} == FRAMES
    assert all(fact["images"] == report.count("<img ") for fact in facts.values())
    backgrounds = {name: fact["background"] for name, fact in facts.items()}
    screen = "rgb(22, 25, 29)" if dark else "rgb(255, 255, 255)"
    assert backgrounds == {"laptop": screen, "phone": screen, "paper": "rgb(255, 255, 255)"}


# Each way to break a report, and what the check must say of it.
BREAKS = {
    "missing image": ("<main>", '<main><img src="data:image/png;base64,AAAA" alt="">'),
    "console: ": ("<main>", '<main><img src="https://example.invalid/x.png" alt="" width="1" height="1">'),
    "text cut off": ("</style>", "h1 { width: 80px; overflow: hidden; white-space: nowrap; }</style>"),
    "outside the window": ("<main>", '<main><p style="position: absolute; left: 5000px">far</p>'),
    "page wider than the window": ("<main>", '<main><p style="width: 3000px">wide</p>'),
    "low contrast": ("<main>", '<main><p style="color: #888; background: #999">pale</p>'),
    "small text": ("<main>", '<main><p style="font-size: 6px">small</p>'),
    "chart text cut off": ("</style>", ".chart .label { transform: translateX(400px); }</style>"),
    "chart texts overlap": ("</style>", ".chart .tick { font-size: 40px; }</style>"),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The findings of a report that is broken in every way at once."""
    report = render(*full(count=4))
    for old, new in BREAKS.values():
        assert old in report
        report = report.replace(old, new, 1)
    return inspect(report, tmp_path_factory.mktemp("broken"))[0]


@pytest.mark.parametrize("kind", BREAKS)
def test_the_check_sees_what_is_broken(kind: str, broken: list[str]) -> None:
    assert any(kind in finding for finding in broken)


def test_the_check_sees_script_errors(tmp_path: Path) -> None:
    report = render(*full(count=1)).replace("</main>", "</main><script>throw new Error('boom')</script>")
    allowed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report)
    findings, _ = inspect(allowed, tmp_path)
    assert any("boom" in finding for finding in findings)
    # As shipped, the report's own policy keeps the script from running at all, and the browser says so.
    findings, _ = inspect(report, tmp_path)
    assert any("Content Security Policy" in finding for finding in findings)
    assert not any("boom" in finding for finding in findings)


@pytest.mark.parametrize("sample", SAMPLES)
def test_it_prints_on_a4(sample: str, tmp_path: Path) -> None:
    report, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    write_report(*SAMPLES[sample](), report)
    run("--no-pdf-header-footer", f"--print-to-pdf={paper}", report.resolve().as_uri())
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    boxes = {tuple(round(float(n)) for n in found.split()) for found in re.findall(rb"/MediaBox \[([^\]]+)\]", content)}
    assert boxes == {(0, 0, *A4)}
    if shutil.which("pdftotext"):
        command = ["pdftotext", "-bbox", str(paper), "-"]
        words = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout
        edges = re.findall(r'xMin="([\d.-]+)" yMin="([\d.-]+)" xMax="([\d.-]+)" yMax="([\d.-]+)"', words)
        assert len(edges) > 100
        for left, top, right, bottom in (map(float, edge) for edge in edges):
            assert left >= 30
            assert top >= 30
            assert right <= A4[0] - 30
            assert bottom <= A4[1] - 30
