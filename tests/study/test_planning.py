"""A plan: quick, and right about what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.leakage import reference
from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import gathered, plan_study, run_study
from fedveil.workers import Workers

TABLE = """
title = "A table"
attack = ["link"]
[task]
data = "digits"
model = "mlp:hidden=[16]"
clients = 2
limit = 80
[federation]
rounds = 1
[audit]
victims = 2
candidates = 5
[[rows]]
name = "none"
[[rows]]
name = "noise"
defense = "gaussian-noise:sigma=0.1"
[[columns]]
head = "accuracy"
metric = "test"
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "table.toml"
    path.write_text(TABLE, encoding="utf-8")
    return path


def test_a_plan_trains_no_judge(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*_: object) -> None:
        raise AssertionError("a judge was trained")

    monkeypatch.setattr(reference, "_train", trained)
    plan = plan_study(table, "paper", IndexedStore(tmp_path / "store"))
    assert plan.estimates.results == 2
    assert plan.estimates.seconds > 0


def test_what_is_kept_is_known_without_the_judge(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = IndexedStore(tmp_path / "store")
    whole = run_study(plan_study(table, "paper", store), store, Workers(1))
    assert plan_study(table, "paper", store).estimates.kept == 2
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "empty"))
    plan = plan_study(table, "paper", store)
    assert plan.estimates.kept == 2
    assert gathered(plan, store) == whole
    # A forecast of other audits beside them does not lose them either.
    other = table.with_name("other.toml")
    other.write_text(TABLE.replace("sigma=0.1", "sigma=0.2"), encoding="utf-8")
    assert plan_study(other, "paper", store).estimates.kept == 1
    assert gathered(plan_study(table, "paper", store), store) == whole
