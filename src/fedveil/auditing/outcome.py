"""What `audit` returns: the result document, its pictures, and ways to show and keep them."""

from __future__ import annotations

from pathlib import Path

from fedveil.auditing.result import Estimate, Images, Result, Row, save_result
from fedveil.errors import FedveilError
from fedveil.files import writable_folder
from fedveil.leakage.catalog import METRICS
from fedveil.ownership import owned

ROLE_TITLES = {
    "ceiling": "undefended (ceiling)",
    "naive": "defended, naive attacker",
    "adaptive": "defended, adaptive attacker",
    "noise-floor": "floor: noise for the update",
    "mean-floor": "floor: the mean image",
    "bound": "perfect inversion (bound)",
}


class LeakageTable:
    """The rows of a result as a table: print it, or index it by role and metric.

    `table["adaptive", "psnr"]` is an `Estimate` with mean, low, high and count: of the attack that recovers most by
    that metric, over all attacked rounds. `table["adaptive", "psnr", "dlg"]` is that of one attack, and
    `table.of(round=3)["adaptive", "psnr"]` that of one round.
    """

    def __init__(self, rows: list[Row], round: int | None = None) -> None:
        self.rows = rows
        self._round = round

    def of(self, *, round: int) -> LeakageTable:
        """The table of one attacked round."""
        rows = [row for row in self.rows if row.round == round]
        if rows:
            return LeakageTable(rows, round)
        rounds = sorted({row.round for row in self.rows if row.round is not None})
        only = "one round was attacked, which the table is of" if not rounds else f"there are {rounds}"
        raise FedveilError(f"there are no rows of round {round} apart: {only}")

    def __getitem__(self, key: tuple[str, str] | tuple[str, str, str]) -> Estimate:
        role, name, *attack = key
        found = [
            row.metrics[name]
            for row in self.rows
            if row.role == role
            and row.round == self._round
            and name in row.metrics
            and row.attack in (attack or [row.attack])
        ]
        if not found:
            raise KeyError(key)
        best = found[0]
        for each in found[1:]:
            best = each if METRICS[name].leaks_more(each.mean, best.mean) else best
        return best

    def __str__(self) -> str:
        shown = [
            name for name in ("identified", "psnr", "ssim", "mse") if any(name in row.metrics for row in self.rows)
        ]
        head = ["", *(METRICS[name].column for name in shown)]
        lines = [head]
        for row in self.rows:
            title = ROLE_TITLES[row.role] + (f", {row.attack}" if row.attack else "")
            title += f", round {row.round}" if row.round is not None else ""
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
        folder = Path(folder)
        with owned(folder):
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
