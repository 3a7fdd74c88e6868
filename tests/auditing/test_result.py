"""Results of earlier versions still load and are still reported."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fedveil.auditing.again import config_toml
from fedveil.auditing.result import load_result
from fedveil.report import render

EARLIER = Path(__file__).parent / "earlier"  # as version 0.1.0 wrote it, before rounds, warnings and answers


def test_a_result_of_the_earlier_layout_loads_and_is_reported() -> None:
    result, images = load_result(EARLIER)
    assert (result.verdict.role, result.verdict.answers, result.attacked) == (None, [], "")
    page = render(result, images)
    for sentence in result.verdict.sentences:
        assert re.split(r"\d", sentence)[0] in page
    assert "2 updates of one image each" in page
    assert "keep 0.6, sigma 0.005, match_spread no, at gradient" in page
    assert tomllib.loads(config_toml(result.provenance.config))["task"]["data"] == "digits"
