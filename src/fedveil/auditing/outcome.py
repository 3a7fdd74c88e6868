"""What `audit` returns: the result document, its pictures, and ways to show and keep them."""

from __future__ import annotations

from pathlib import Path

from fedveil.auditing.result import Estimate, Images, Result, Row, save_result
from fedveil.files import writable_folder
from fedveil.leakage.catalog import METRICS

ROLE_TITLES = {
    "ceiling": "undefended (ceiling)",
    "naive": "defended, naive attacker",
    "adaptive": "defended, adaptive attacker",
    "noise-floor": "floor: noise for the update",
    "mean-floor": "floor: the mean image",
    "bound": "the perturbed input",
}


class LeakageTable:
    """The rows of a result as a table: print it, or index it by role and metric.

    `table["adaptive", "psnr"]` is an `Estimate` with mean, low, high and count.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __getitem__(self, key: tuple[str, str]) -> Estimate:
        role, metric = key
        for row in self.rows:
            if row.role == role and metric in row.metrics:
                return row.metrics[metric]
        raise KeyError(key)

    def __str__(self) -> str:
        shown = [
            name for name in ("identified", "psnr", "ssim", "mse") if any(name in row.metrics for row in self.rows)
        ]
        head = ["", *(METRICS[name].column for name in shown)]
        lines = [head]
        for row in self.rows:
            title = ROLE_TITLES[row.role] + (f", {row.attack}" if row.attack else "")
            cells = [_cell(row.metrics.get(name), name) for name in shown]
            lines.append([title + (" *" if row.strongest else ""), *cells])
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    __repr__ = __str__


class Outcome:
    """The finding of an audit.

    `leakage` is the table, `verdict` the three sentences, `report(path)` writes the HTML page, `save(folder)` the data
    behind it (`fedveil report FOLDER` makes the page from that again).
    """

    def __init__(self, result: Result, images: Images) -> None:
        self.result = result
        self.images = images

    @property
    def leakage(self) -> LeakageTable:
        """Every metric with its interval, with floors and ceiling."""
        return LeakageTable(self.result.rows)

    @property
    def verdict(self) -> str:
        """The status word and the three sentences."""
        verdict = self.result.verdict
        return f"{verdict.status}: {' '.join(verdict.sentences)}"

    def report(self, path: Path | str) -> Path:
        """Write the report, one HTML file that opens offline."""
        from fedveil.report.render import write_report  # the report stands on the audit; only this method looks up

        path = Path(path)
        writable_folder(path.parent)
        write_report(self.result, self.images, path)
        return path

    def save(self, folder: Path | str) -> Path:
        """Write `result.json` and `images.safetensors`."""
        folder = writable_folder(Path(folder))
        save_result(self.result, self.images, folder)
        return folder

    def __repr__(self) -> str:
        return f"{self.verdict}\n\n{self.leakage}"


def _cell(estimate: Estimate | None, name: str) -> str:
    if estimate is None:
        return "–"
    metric = METRICS[name]
    factor = 100 if metric.share else 1
    low, high = (f"{factor * value:.{metric.digits}f}" for value in (estimate.low, estimate.high))
    return f"{metric.format(estimate.mean)} [{low}, {high}]"
