"""The table of numbers: it fits, nothing is lost, and other programs can read it."""

from __future__ import annotations

import csv
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from fedveil.attacks.threat import ThreatModel
from fedveil.auditing.audit_result import AuditResult, LeakageTable
from fedveil.auditing.result import TOGETHER, Cost, DefenseCard, Estimate, Images, Provenance, Result, Row, Verdict
from fedveil.auditing.roles import Role, wording
from fedveil.auditing.table import FIELDS, as_csv, as_html, as_text
from fedveil.errors import FedveilError
from fedveil.leakage.modalities import modality
from fedveil.leakage.pictures import Pictures

PICTURES = modality("pictures")


def row(attack: str, role: Role, mean: float = 0.5, **more: object) -> Row:
    metrics = {
        "identified": Estimate(mean=mean, low=0.25, high=1.0, count=16),
        "psnr": Estimate(mean=24.25, low=20.5, high=28.75, count=16),
        "ssim": Estimate(mean=0.875, low=0.5, high=1.0, count=16),
        "mse": Estimate(mean=0.0625, low=0.03125, high=0.125, count=16),
        "lpips": Estimate(mean=0.1, low=0.05, high=0.2, count=16),
    }
    return Row(attack=attack, role=role, metrics=metrics, values={}, **more)  # type: ignore[arg-type]


ROLES: tuple[Role, ...] = ("ceiling", "naive", "adaptive", "noise-floor")
ROWS = [row(attack, role, strongest=role == "adaptive") for attack in ("inverting-gradients", "dlg") for role in ROLES]
ROWS += [row("", "mean-floor"), row("", "bound")]


def outcome(rows: list[Row], sentence: str = "An attacker recognizes 50 % of the images.") -> AuditResult:
    card = DefenseCard(
        name="clip",
        settings={},
        spelled="clip",
        summary="",
        acts_on="",
        guarantee="",
        formal=False,
        weaknesses=[],
        paper="",
    )
    made = Provenance(command="", config={}, seed=0, versions={}, machine="", hashes={}, started="", seconds=0.0)
    result = Result(
        data="digits",
        model="mlp",
        protocol="FedSGD",
        defense=card,
        verdict=Verdict(status="partly exposed", sentences=[sentence, "Cost.", "None."], why=""),
        rows=rows,
        candidates=100,
        cost=Cost(),
        attacks=[],
        assumptions=[],
        not_given=[],
        not_tried=[],
        provenance=made,
    )
    return AuditResult(result, Images(np.zeros((1, 1, 2, 2), np.float32), np.zeros(1, np.int64)))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_table_fits_and_loses_nothing(width: int) -> None:
    text = as_text(ROWS, PICTURES, width)
    assert max(map(len, text.splitlines())) <= width
    for head, cell in {
        "identified (%) ↓": "50 % [25, 100]",
        "PSNR (dB) ↓": "24.2 dB [20.5, 28.8]",
        "SSIM ↓": "0.875 [0.500, 1.000]",
    }.items():
        assert text.count(head) == 1
        assert text.count(cell) == len(ROWS)
    blocks = text.split("\n\n")
    assert (len(blocks) == 1) == (width >= 200)
    for block in blocks:
        lines = [line[:32].rstrip() for line in block.splitlines()[1:]]
        assert lines[:4] == [
            "inverting-gradients",
            "  undefended (ceiling)",
            "  defended, naive attacker",
            "  defended, adaptive attacker *",
        ]
        assert lines[5] == "dlg"
        assert lines[10:] == ["no attack", "  floor: the mean image", "  the perturbed input"]


def linked(role: Role, mean: float = 0.5, **more: object) -> Row:
    metrics = {"linked": Estimate(mean=mean, low=0.25, high=1.0, count=16)}
    return Row(attack="link", role=role, question="link", metrics=metrics, values={}, **more)  # type: ignore[arg-type]


def test_links_stand_below_with_what_is_formally_allowed() -> None:
    links = [linked("ceiling"), linked("naive"), linked("adaptive", bound=0.3612, strongest=True)]
    text = as_text([*ROWS, *links], PICTURES, 200)
    blocks = text.split("\n\n")
    assert blocks[0] == as_text(ROWS, PICTURES, 200)
    lines = [line.split("  ") for line in blocks[1].splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells == [
        ["linked (%) ↓", "formal bound"],
        ["link"],
        ["undefended (ceiling)", "50 % [25, 100]", "–"],
        ["defended, naive attacker", "50 % [25, 100]", "no formal bound"],
        ["defended, adaptive attacker *", "50 % [25, 100]", "≤ 37 %"],
    ]
    assert as_html(links, PICTURES).count("<td>≤ 37 %</td>") == 1
    assert as_csv(links).splitlines()[-1] == "link,adaptive,,linked,0.5,0.25,1.0,16,0.3612,"


def test_the_table_answers_by_one_attack_unless_asked_for_all() -> None:
    rows = [row("dlg", "naive", 0.2), row("other", "naive", 0.4), row(TOGETHER, "naive", 0.5), linked("naive", 0.1)]
    table = LeakageTable(rows, PICTURES)
    assert table["naive", "identified"].mean == 0.4
    assert table["naive", "identified", "dlg"].mean == 0.2
    assert table["naive", "identified", TOGETHER].mean == 0.5
    assert table["naive", "linked"].mean == 0.1
    result = outcome(rows).result
    for given, attack in ({}, "other"), ({"attack": TOGETHER}, TOGETHER), ({"question": "link"}, "link"):
        found = result.row("naive", **given)  # type: ignore[arg-type]
        assert found is not None
        assert found.attack == attack


def test_rounds_stand_apart() -> None:
    text = as_text([row("dlg", "ceiling", round=1), row("dlg", "ceiling", round=5)], PICTURES, 80, blocks=1)
    assert [line for line in text.splitlines() if line.startswith("dlg")] == ["dlg, round 1", "dlg, round 5"]


def test_what_was_not_measured_is_a_dash() -> None:
    bare = Row(attack="dlg", role="naive", metrics={}, values={})
    assert "–" in as_text([row("dlg", "ceiling"), bare], PICTURES, 80)


def test_print_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert str(LeakageTable(ROWS, PICTURES)) == as_text(ROWS, PICTURES, 70)


def test_the_repr_is_short_and_fits() -> None:
    long = outcome(ROWS, "An attacker who knows the defense recognizes some of the images; " * 3)
    lines = repr(long).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("partly exposed: An attacker")
    assert len(lines) < 22
    assert "identified" in repr(long)


def test_a_notebook_gets_html_in_which_nothing_is_taken_for_a_tag() -> None:
    rows = [row("<script>alert(1)</script>", "ceiling", round=3)]
    for shown in (as_html(rows, PICTURES), outcome(rows, "<b>5 & 6</b>")._repr_html_()):
        assert "&lt;script&gt;alert(1)&lt;/script&gt;, round 3" in shown
        assert "<script" not in shown
        assert "<td>50 % [25, 100]</td>" in shown
    assert "<b>partly exposed</b>: &lt;b&gt;5 &amp; 6" in shown


def test_csv_has_every_number(tmp_path: Path) -> None:
    path = outcome([*ROWS, row("dlg", "naive", round=5)]).csv(tmp_path / "new" / "numbers.csv")
    with path.open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == list(FIELDS)
    assert len(read) == (len(ROWS) + 1) * 5
    assert {each["metric"] for each in read} == {"identified", "psnr", "ssim", "mse", "lpips"}
    numbers = ["24.25", "20.5", "28.75", "16", "", ""]
    assert list(read[1].values()) == ["inverting-gradients", "ceiling", "", "psnr", *numbers]
    assert read[-1]["round"] == "5"
    assert as_csv([]) == "attack,role,round,metric,mean,low,high,count,bound,attacker_has\n"


def test_what_each_attacker_has_is_a_column() -> None:
    more = ThreatModel(has=("labels", "auxiliary data (5,000 held-out test images)"), knows=("the defense",))
    rows = [row("dlg", "naive", threat=ThreatModel()), row("learned-linear", "adaptive", threat=more)]
    text = as_text(rows, PICTURES, 80)
    assert max(map(len, text.splitlines())) <= 80
    last = text.split("\n\n")[-1]
    assert "attacker has" in last
    assert "the update alone" in last
    assert "labels, auxiliary data, knows the defense" in last
    assert (
        as_csv(rows)
        .splitlines()[-1]
        .endswith('"labels, auxiliary data (5,000 held-out test images), knows the defense"')
    )
    assert "attacker has" not in as_text(ROWS, PICTURES, 80)  # of a version that did not keep it


def test_a_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedveilError, match="needs pandas: pip install pandas"):
        outcome(ROWS).frame()

    def frame(records: list[dict[str, object]], columns: list[str]) -> tuple[object, object]:
        return [tuple(each) for each in records], tuple(columns)

    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=frame))
    keys, columns = outcome(ROWS).frame()
    assert len(keys) == len(ROWS) * 5
    assert set(keys) == {columns}


def test_who_takes_updates_as_they_are_is_not_called_defended_where_nobody_knows_of_a_defense() -> None:
    assert wording(["naive", "noise-floor"], Pictures.words)["naive"].title == "updates as they are"
    for present in (["ceiling", "naive"], ["naive", "adaptive"]):
        assert wording(present, Pictures.words)["naive"].title == "defended, naive attacker"  # type: ignore[arg-type]
