"""A table from its file to its report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedveil as fv
from fedveil.auditing.settings import AuditSettings
from fedveil.report.render import render


def table(folder: Path) -> str:
    random = np.random.default_rng(0)
    lines = ["age,dose,city,smoker,ill"]
    for _ in range(120):
        age, dose = random.normal(50, 12), random.exponential(3)
        city, smoker = "ABCD"[random.integers(4)], ("no", "yes")[random.integers(2)]
        lines.append(f"{age:.1f},{dose:.3f},{city},{smoker},{'yes' if age + 5 * dose > 65 else 'no'}")
    (folder / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    return f"csv:path={folder / 'rows.csv'},target=ill"


@pytest.mark.parametrize("attack", ["analytic", "inverting-gradients:steps=100,restarts=1", "dlg:steps=20"])
def test_undefended_rows_come_back_with_their_categories(tmp_path: Path, attack: str) -> None:
    task = fv.task(table(tmp_path), model="mlp:hidden=[64]", clients=2)
    found = fv.audit(task, attack=attack, settings=AuditSettings(victims=2), train=False)
    row = found.result.row("ceiling", attack.partition(":")[0])
    assert row is not None
    assert row.metrics["cells"].mean == 1
    assert row.metrics["category_cells"].mean == 1


def test_batches_of_two_classes_come_back_exactly_and_the_report_shows_rows(tmp_path: Path) -> None:
    task = fv.task("breast-cancer", model="mlp", clients=4)
    settings = AuditSettings(victims=1, batch_size=8)
    found = fv.audit(task, "gradient-dropout", suite="quick", settings=settings, train=False)
    row = found.result.row("ceiling", "analytic")
    assert row is not None
    assert row.metrics["whole_rows"].mean == 1
    assert any(each.question == "link" for each in found.result.rows)
    page = render(found.result, found.images)
    assert "mean radius" in page
    assert "30 of 30" in page
    assert 'class="number hit"' in page
    assert "the mean row" in page
    assert "mean image" not in page


def test_attacks_on_pictures_say_so(tmp_path: Path) -> None:
    task = fv.task("breast-cancer", model="mlp", clients=4)
    with pytest.raises(fv.FedveilError, match="ci-net attacks pictures, not records"):
        fv.audit(task, attack="ci-net", train=False)
