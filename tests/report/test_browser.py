"""The report in a real browser: laptop, phone, dark, paper. And proof that the check sees what is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.auditing.result import Estimate, Images, Result
from fedveil.auditing.verdict import judge
from fedveil.report import render, write_report

from .page_check import FRAMES, TIMEOUT, browser, inspect, run
from .report_samples import SAMPLES, bare, full, links, terms

needs_pdftotext = pytest.mark.skipif(shutil.which("pdftotext") is None, reason="needs pdftotext to read the pages")
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
    "table cut off": ("<main>", '<main><div class="scroll"><table><tr><td style="min-width: 2000px">wide'),
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


def printed(result: Result, images: Images, folder: Path) -> list[str]:
    """The text of every printed page."""
    report, paper = folder / "report.html", folder / "report.pdf"
    write_report(result, images, report)
    run("--no-pdf-header-footer", f"--print-to-pdf={paper}", report.resolve().as_uri())
    command = ["pdftotext", "-layout", str(paper), "-"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout
    return text.split("\f")[:-1]


def with_all_warnings() -> tuple[Result, Images]:
    """As much as an audit may have to say on its first page."""
    result, images = full()
    rows = [row for row in result.rows if row.role != "adaptive" and row.question == "reconstruct"]
    rows += links(32, bound=0.2, shares={"ceiling": 1.0, "naive": 0.0, "noise-floor": 0.0})
    cost = result.cost.model_copy(
        update={"rounds": 3, "slowdown_interval": None, "majority": 0.83}
        | {"difference": Estimate(mean=-0.2, low=-0.3, high=-0.1, count=999)}
    )
    few = [row.model_copy(update={"round": number}) for number in (1, 3, 5) for row in rows]
    verdict = judge(
        few,
        cost,
        "Formal guarantee: ε = 3.2 at δ = 1e-05 for one training example over 30 rounds (PLD accountant). From one "
        "update no attacker at all can pick the right one of 100 more often than 20 % of the time.",
        terms(victims=32, attackers="naive"),
    )
    assert verdict.command
    assert [answer.status for answer in verdict.answers] == ["not judged"] * 3
    assert len(verdict.warnings) >= 4
    return result.model_copy(update={"cost": cost, "verdict": verdict, "rows": [*result.rows, *few]}), images


@pytest.mark.parametrize("sample", [full, bare, with_all_warnings], ids=["full", "bare", "all warnings"])
def test_the_summary_fits_on_one_sheet(sample: Callable[[], tuple[Result, Images]], tmp_path: Path) -> None:
    _, facts = inspect(render(*sample()), tmp_path)
    margin = re.search(r"@page \{ size: A4; margin: (\d+)mm", render(*bare()))
    assert margin is not None
    sheet = (297 - 2 * int(margin.group(1))) / 25.4 * 96  # pixels
    assert 100 < float(str(facts["paper"]["summary"])) <= sheet


@needs_pdftotext
@pytest.mark.parametrize("sample", [full, bare, with_all_warnings], ids=["full", "bare", "all warnings"])
def test_the_summary_is_the_first_sheet_and_the_rest_follows_unfolded(
    sample: Callable[[], tuple[Result, Images]], tmp_path: Path
) -> None:
    first, second, *rest = printed(*sample(), tmp_path)
    assert "What the updates give away" in first
    assert "Who ran what" in first
    assert second.lstrip().startswith("How it was judged")
    for heading in ("Numbers", "Cost", "What was assumed", "Known weaknesses", "Versions", "Configuration"):
        assert any(heading in page for page in (second, *rest)), heading


@needs_pdftotext
@pytest.mark.parametrize("count", [9, 13])
def test_tables_stay_with_their_headings(count: int, tmp_path: Path) -> None:
    pages = printed(*full(count=count), tmp_path)
    for heading, head in {"Numbers": "Who\\s", "Cost": "After 30 rounds"}.items():
        (page,) = [page for page in pages[1:] if re.search(rf"^ *{heading}$", page, re.MULTILINE)]
        below = page[re.search(rf"^ *{heading}$", page, re.MULTILINE).end() :]  # type: ignore[union-attr]
        assert re.search(rf"{head}.*\n(.*\n)*.*(No defense|Test accuracy)", below), heading


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
