"""Results of earlier versions still load and are still reported."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from fedveil.auditing.again import config_toml
from fedveil.auditing.result import load_result
from fedveil.errors import FedveilError
from fedveil.report import render

EARLIER = Path(__file__).parent / "earlier"  # as version 0.1.0 wrote it, before rounds, warnings and answers


def test_a_result_of_the_earlier_layout_loads_and_is_reported() -> None:
    result, images = load_result(EARLIER)
    (answer,) = result.verdict.answers
    assert result.verdict.lead is answer
    assert (answer.question, answer.role, answer.status, result.attacked) == ("reconstruct", None, "not judged", "")
    assert answer.sentence == result.verdict.sentences[0]
    assert (result.format, result.modality, result.candidates) == ("fedveil-result-2", "pictures", 5)
    assert result.attacks[0].curves[0].steps[-1] == 4
    assert set(result.attacks[0].on_the_way["ceiling"]["ssim"]) == {"1/3", "2/3", "all"}
    page = render(result, images)
    for sentence in result.verdict.sentences:
        assert re.split(r"\d", sentence)[0] in page
    assert "2 updates of one image each" in page
    assert "keep 0.6, sigma 0.005, match_spread no, at gradient" in page
    assert tomllib.loads(config_toml(result.provenance.config))["task"]["data"] == "digits"


def test_a_result_of_the_first_format_keeps_its_answers_and_its_settings(tmp_path: Path) -> None:
    old = json.loads((EARLIER / "result.json").read_text())
    said = [{"question": f"Question {n}?", "status": "not judged", "why": f"Reason {n}."} for n in (1, 2, 3)]
    old["verdict"] |= {"role": "naive", "attack": "dlg", "round": 3, "measure": "identified", "answers": said}
    old["verdict"] |= {"next_step": "Use more.", "command": "fedveil audit"}
    old["provenance"]["config"]["audit"]["recognizable_ssim"] = 0.7
    (tmp_path / "result.json").write_text(json.dumps(old))
    shutil.copy(EARLIER / "images.safetensors", tmp_path)
    result, images = load_result(tmp_path)
    first, *others = result.verdict.answers
    assert (first.asked, first.role, first.attack, first.round, first.command) == (
        *("Question 1?", "naive", "dlg", 3),
        "fedveil audit",
    )
    assert [(each.question, each.asked, each.why, each.role) for each in others] == [
        ("link", "Question 2?", "Reason 2.", None),
        ("member", "Question 3?", "Reason 3.", None),
    ]
    assert result.provenance.config["audit"]["recognizable_from"] == 0.7
    assert "recognizable_ssim" not in result.provenance.config["audit"]
    assert render(result, images)


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "fedveil-result-1"}',
        '{"format": "fedveil-result-1", "verdict": 3, "identified_among": 4, "attacks": []}',
        '{"format": "fedveil-result-1", "x": ' + "[" * 50_000,
        '{"format": "fedveil-result-3"}',
        "[]",
    ],
    ids=["empty", "odd", "deep", "later", "list"],
)
def test_what_is_no_result_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(FedveilError, match="is not a fedveil result") as raised:
        load_result(tmp_path)
    assert "\n" not in str(raised.value)
