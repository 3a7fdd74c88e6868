"""Open a report in a real browser and list what is wrong with how it looks.

The report stands unchanged in frames of several widths; a script of the page around them looks into the frames. (A
headless window cannot be made as narrow as a phone, a frame can; and the report itself allows no scripts.)
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

# Names and widths of the frames. "paper" is A4 without its margins, with the print rules switched on.
FRAMES = {"laptop": 1280, "phone": 390, "paper": 680}
TIMEOUT = 600  # seconds; only a browser that hangs takes so long
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
]

CHECK = r"""
const findings = [];
const facts = {};

function scrolls(element, view) {
  for (let up = element.parentElement; up; up = up.parentElement)
    if (["auto", "scroll"].includes(view.getComputedStyle(up).overflowX)) return true;
  return false;
}
function luminance(color) {
  const [r, g, b] = color.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function parse(color) {
  const n = color.match(/[\d.]+/g).map(Number);
  return {rgb: n.slice(0, 3), alpha: n.length > 3 ? n[3] : 1};
}
function background(element, view) {
  for (let up = element; up; up = up.parentElement) {
    const found = parse(view.getComputedStyle(up).backgroundColor);
    if (found.alpha > 0.5) return found.rgb;
  }
  return [255, 255, 255];
}
function contrast(a, b) {
  const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
}
function told(element) {
  const words = element.textContent.trim().slice(0, 40);
  return `<${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}"> ${words}`;
}
function check(frame) {
  const name = frame.dataset.name, page = frame.contentDocument, view = frame.contentWindow;
  const report = (kind, element) => findings.push(`${name}: ${kind}: ${told(element)}`);
  if (name === "paper")
    for (const sheet of page.styleSheets)
      for (const rule of sheet.cssRules)
        if (rule.media && rule.media.mediaText === "print") rule.media.mediaText = "all";
  // What is folded must be right too once the reader opens it; on paper it is shown as it is.
  else for (const fold of page.querySelectorAll("details")) fold.open = true;
  const width = view.innerWidth;
  const summary = page.getElementById("summary");
  facts[name] = {width, background: view.getComputedStyle(page.body).backgroundColor, images: page.images.length,
    summary: summary ? summary.getBoundingClientRect().height : 0};
  for (const image of page.images)
    if (!image.complete || image.naturalWidth === 0) report("missing image", image);
  if (page.documentElement.scrollWidth > width) report("page wider than the window", page.documentElement);
  for (const element of page.body.querySelectorAll("*")) {
    if (element.ownerSVGElement || !element.getClientRects().length) continue;
    const style = view.getComputedStyle(element), box = element.getBoundingClientRect();
    const clips = ["hidden", "clip", "visible"];
    if (element.tagName !== "svg" && style.display !== "inline" && clips.includes(style.overflowX)
        && element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1) report("text cut off", element);
    if (name === "laptop" && ["auto", "scroll"].includes(style.overflowX)
        && element.scrollWidth > element.clientWidth + 1) report("table cut off", element);
    if (["hidden", "clip"].includes(style.overflowY) && element.scrollHeight > element.clientHeight + 1
        && element.tagName !== "svg") report("text cut off", element);
    if ((box.right > width + 1 || box.left < -1) && !scrolls(element, view)) report("outside the window", element);
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (own) {
      const size = parseFloat(style.fontSize);
      const enough = size >= 24 || (size >= 18.6 && style.fontWeight >= 700) ? 3 : 4.5;
      if (contrast(parse(style.color).rgb, background(element, view)) < enough) report("low contrast", element);
      if (size < (name === "paper" ? 9 : 11)) report("small text", element);
    }
  }
  for (const svg of page.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter(text => text.getClientRects().length);
    const scale = svg.viewBox.baseVal && svg.viewBox.baseVal.width ? frame.width / svg.viewBox.baseVal.width : 1;
    const boxes = texts.map(text => text.getBoundingClientRect());
    texts.forEach((text, i) => {
      const box = boxes[i], style = view.getComputedStyle(text);
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
          || box.bottom > frame.bottom + 1) report("chart text cut off", text);
      if (parseFloat(style.fontSize) * scale < 10) report("small text", text);
      if (contrast(parse(style.fill).rgb, background(svg, view)) < 4.5) report("low contrast", text);
      for (let j = 0; j < i; j++) {
        const other = boxes[j];
        const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
        if (across > 1 && down > 3) report("chart texts overlap", text);
      }
    });
  }
}
addEventListener("load", () => {
  try { document.querySelectorAll("iframe").forEach(check); }
  catch (error) { findings.push("the check itself failed: " + error.stack); }
  // A tag in a finding must not end the element that it is written into.
  document.getElementById("findings").textContent = JSON.stringify({findings, facts}).replace(/</g, "\\u003c");
});
"""


def browser() -> str | None:
    """The path of Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


def run(*arguments: str) -> tuple[str, str]:
    """Run the browser with a profile of its own; its output and its log."""
    program = browser()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return done.stdout, done.stderr


def inspect(report: str, folder: Path, *, dark: bool = False) -> tuple[list[str], dict[str, dict[str, object]]]:
    """What is wrong with a report (empty: nothing), and what was really shown in each frame."""
    frames = "".join(
        f'<iframe data-name="{name}" width="{width}" height="800" style="border:0" srcdoc="{html.escape(report)}">'
        "</iframe>"
        for name, width in FRAMES.items()
    )
    page = folder / "wrapper.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">{frames}'
        f'<script id="findings" type="application/json"></script><script>{CHECK}</script>',
        encoding="utf-8",
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    output, log = run(
        scheme, "--window-size=1400,900", "--virtual-time-budget=10000", "--dump-dom", page.resolve().as_uri()
    )
    found = re.search(r'<script id="findings" type="application/json">(.*?)</script>', output, re.DOTALL)
    assert found is not None, f"the browser did not show the page: {log[-2000:]}"
    assert found.group(1), f"the check did not run: {log[-2000:]}"
    answer = json.loads(found.group(1))
    console = [f"console: {line.strip()[:300]}" for line in log.splitlines() if "CONSOLE" in line]
    return answer["findings"] + console, answer["facts"]
