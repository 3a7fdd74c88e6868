"""What `audit` returns: the result document, its pictures, and ways to show and keep them."""

from __future__ import annotations

import html
import importlib
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.auditing.result import TOGETHER, Estimate, Images, Result, Row, save_result
from fedveil.auditing.roles import Role
from fedveil.auditing.table import FIELDS, as_csv, as_html, as_records, as_text
from fedveil.errors import FedveilError
from fedveil.files import writable_folder, write_atomically
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.modalities import modality
from fedveil.leakage.modality import Modality
from fedveil.ownership import owned

if TYPE_CHECKING:
    from fedveil.attacks.finding import Finding


class LeakageTable:
    """The rows of a result as a table: print it, or index it by role and metric.

    `table["adaptive", "linked"]` is an `Estimate` with mean, low, high and count: of the attack that gets most by that
    metric, over all attacked rounds. `table["adaptive", "mse", "dlg"]` is that of one attack, and
    `table.of(round=3)["adaptive", "mse"]` that of one round.
    """

    def __init__(self, rows: list[Row], kind: Modality, round: int | None = None) -> None:
        self.rows = rows
        self._kind = kind
        self._round = round

    def of(self, *, round: int) -> LeakageTable:
        """The table of one attacked round."""
        rows = [row for row in self.rows if row.round == round]
        if rows:
            return LeakageTable(rows, self._kind, round)
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
            and (row.attack in attack if attack else row.attack != TOGETHER)
        ]
        if not found:
            raise KeyError(key)
        best = found[0]
        for each in found[1:]:
            best = each if METRICS[name].leaks_more(each.mean, best.mean) else best
        return best

    def __str__(self) -> str:
        return as_text(self.rows, self._kind, shutil.get_terminal_size().columns)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.rows, self._kind)


class AuditResult:
    """What an audit found.

    `leakage` is the table, `verdict` the sentences, `report(path)` writes the HTML page, `save(folder)` the data
    behind it (`fedveil report FOLDER` makes the page from that again). `csv(path)` and `frame()` give every number.
    `findings` has what each attack on captured updates found, by its name and role; an audit keeps it in its store.
    """

    def __init__(
        self, result: Result, images: Images, findings: Mapping[str, Mapping[Role, Finding]] | None = None
    ) -> None:
        self.result = result
        self.images = images
        self.findings = findings or {}

    @property
    def leakage(self) -> LeakageTable:
        """Every metric with its interval, with floors and ceiling."""
        return LeakageTable(self.result.rows, modality(self.result.modality))

    @property
    def verdict(self) -> str:
        """The status word and the sentences."""
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

    def csv(self, path: Path | str) -> Path:
        """Write every number: one line for each attack, role, round and metric, with mean, low, high and count."""
        path = Path(path)
        writable_folder(path.parent)
        write_atomically(path, as_csv(self.result.rows).encode())
        return path

    def frame(self) -> Any:
        """The lines of `csv` as a pandas DataFrame."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise FedveilError("frame() needs pandas: pip install pandas (csv(path) does without)") from None
        return pandas.DataFrame(as_records(self.result.rows), columns=list(FIELDS))

    def history(self) -> list[dict[str, Any]]:
        """The utility of every round, in lines for a table: pandas.DataFrame(result.history()).

        part: "test", "validation", or "train", which is a sample of at most 1,000 training examples.
        """
        return [
            {"round": each.round, "part": part, "which": which, "metric": self.result.cost.metric, "value": value}
            for each in self.result.cost.history
            for part, values in each.parts().items()
            for which, value in values.items()
        ]

    def __repr__(self) -> str:
        """The status, the finding in a sentence and the first columns: 80 letters wide."""
        table = as_text(self.result.rows, modality(self.result.modality), 80, blocks=1)
        return f"{textwrap.fill(self._finding(), 80)}\n\n{table}"

    def _repr_html_(self) -> str:
        status, _, rest = self._finding().partition(":")
        return f"<p><b>{html.escape(status)}</b>:{html.escape(rest)}</p>{self.leakage._repr_html_()}"

    def _finding(self) -> str:
        return f"{self.result.verdict.status}: {self.result.verdict.sentences[0]}"
