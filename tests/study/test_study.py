"""A study is run, stopped, killed and shared; it comes to the same table."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fedveil.study.outcome import Outcome
from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import gathered, plan_study, run_study
from fedveil.workers import Workers
from journeys.console import environment, program, run_program
from waiting import PATIENCE

TABLE = """
title = "A table"
attack = ["inverting-gradients"]
seeds = [0]
[task]
data = "mnist"
[[rows]]
name = "none"
[[rows]]
name = "noise"
defense = "gaussian-noise:sigma=0.1"
own = true
[[rows]]
name = "clip"
defense = "clip"
[[columns]]
head = "accuracy"
metric = "test"
[[columns]]
head = "PSNR"
metric = "psnr"
[[columns]]
head = "LPIPS"
metric = "lpips"
[published.""]
noise = ["0.5", "9.1", "0.6"]
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.toml"
    path.write_text(TABLE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What an uninterrupted run comes to."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "table.toml").write_text(TABLE, encoding="utf-8")
    return run(folder / "table.toml", IndexedStore(folder / "store"))


def run(table: Path, store: IndexedStore) -> Outcome:
    return run_study(plan_study(table, "smoke", store), store, Workers(1))


def test_every_cell_has_our_number_or_says_why_not(whole: Outcome) -> None:
    assert len(whole.values) == 9
    for value in whole.values:
        if value.column == "LPIPS":
            assert value.ours is None
            assert "lpips was not measured" in value.missing
        else:
            assert value.ours is not None
    noise = next(each for each in whole.values if (each.row, each.column) == ("noise", "PSNR"))
    assert noise.published == "9.1"
    assert noise.informed is not None


def test_what_is_there_can_be_shown_and_nothing_is_made(whole: Outcome, table: Path, tmp_path: Path) -> None:
    store = IndexedStore(tmp_path / "store")
    plan = plan_study(table, "smoke", store)
    assert {value.missing for value in gathered(plan, store).values} == {"not run yet"}
    assert store.made == []
    assert run(table, store) == whole
    made = len(store.made)
    assert gathered(plan, store) == whole
    assert run(table, store) == whole
    assert len(store.made) == made
    assert {each.state for each in store.index.cells(plan.grid.study).values()} == {"done"}


def test_a_study_on_the_command_line(whole: Outcome, table: Path, tmp_path: Path, fedveil) -> None:
    where = (str(table), "--scale", "smoke", "--store", str(tmp_path / "store"))
    said = fedveil("study", "status", *where)
    assert said.out.count("to do") == 3
    said = fedveil("study", "run", *where)
    assert said.code == 0, said.err
    assert "cut: task.data = digits" in said.err
    assert "[3/3] clip, seed 0" in said.err
    assert "A table" in said.out
    assert fedveil("study", "show", *where).out == said.out
    assert fedveil("study", "status", *where).out.count("done") >= 3
    for form in ("md", "csv", "tex", "html"):
        out = tmp_path / f"out.{form}"
        assert fedveil("study", "export", *where, "--out", str(out)).code == 0
        assert "9.1" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["run", "nowhere/table1"], "there is no study 'nowhere/table1'"),
        (["run", "TABLE", "--scale", "big"], "unknown scale 'big'"),
        (["export", "TABLE", "--out", "x.pdf"], "--out must end with .md, .csv, .tex, .html"),
        (["run", "TABLE", "--scale", "smoke", "--on", "dask"], "--on must be ray"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], why: str, table: Path, tmp_path: Path, fedveil) -> None:
    words = [str(table) if word == "TABLE" else word for word in arguments]
    said = fedveil("study", *words, "--store", str(tmp_path / "store"))
    assert said.code == 2
    assert why in said.err.strip().splitlines()[-1]


def test_a_metric_of_other_data_is_refused_before_anything_is_run(table: Path, tmp_path: Path, fedveil) -> None:
    table.write_text(TABLE.replace('metric = "lpips"', 'metric = "rouge1"'), encoding="utf-8")
    said = fedveil("study", "run", str(table), "--scale", "smoke", "--store", str(tmp_path / "store"))
    assert said.code == 2
    assert "rouge1 does not apply to pictures" in said.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "metric, setting", [("lpips", "audit.lpips"), ("kl", "audit.reference"), ("local", "federation.local_utility")]
)
def test_a_metric_that_nothing_would_measure_is_refused(
    metric: str, setting: str, table: Path, tmp_path: Path, fedveil
) -> None:
    text = TABLE.replace('"lpips"', f'"{metric}"').replace("[[rows]]", '[audit]\nreference = "none"\n[[rows]]', 1)
    table.write_text(text, encoding="utf-8")
    said = fedveil("study", "run", str(table), "--store", str(tmp_path / "store"))
    assert said.code == 2
    assert f"{metric} is only measured where {setting} is set" in said.err.strip().splitlines()[-1]


def test_a_damaged_index_is_one_line_and_can_be_removed(whole: Outcome, table: Path, tmp_path: Path, fedveil) -> None:
    store = tmp_path / "store"
    run(table, IndexedStore(store))
    for path in store.glob("index.sqlite*"):
        path.write_bytes(b"no database")
    said = fedveil("study", "run", str(table), "--scale", "smoke", "--store", str(store))
    assert said.code == 2
    assert "is not a database. It may be removed" in said.err.strip().splitlines()[-1]
    for path in store.glob("index.sqlite*"):
        path.unlink()
    again = IndexedStore(store)
    assert run(table, again) == whole
    assert again.made == []


def test_a_store_of_a_newer_version_is_one_line(table: Path, tmp_path: Path, fedveil) -> None:
    import sqlite3

    store = tmp_path / "store"
    IndexedStore(store)
    database = sqlite3.connect(store / "index.sqlite")
    database.execute("pragma user_version = 7")
    database.close()
    said = fedveil("study", "run", str(table), "--scale", "smoke", "--store", str(store))
    assert said.code == 2
    assert "was written by a newer fedveil" in said.err


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same(whole: Outcome, table: Path, tmp_path: Path) -> None:
    draw, store = random.Random(0), tmp_path / "store"
    asked = ("study", "run", table, "--scale", "smoke", "--store", store)
    killed = 0
    for _ in range(12):
        process = subprocess.Popen(
            program(*asked), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # After so many new files, of any kind: a moment that a slow machine reaches as well.
        goal = _files(store) + draw.randint(1, 8)
        while process.poll() is None and _files(store) < goal:
            time.sleep(0.005)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        if process.wait(timeout=PATIENCE) == 0:
            break
    said = run_program(*asked, cwd=tmp_path)
    assert said.code == 0, said.err
    kept = IndexedStore(store)
    assert gathered(plan_study(table, "smoke", kept), kept) == whole
    assert kept.made == []
    assert killed > 3


def _files(store: Path) -> int:
    try:
        return sum(1 for path in store.rglob("*") if path.is_file())
    except OSError:  # it was just moved
        return 0


@pytest.mark.slow
def test_on_a_local_ray_it_comes_to_the_same(whole: Outcome, table: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    store = tmp_path / "store"
    asked = ("study", "run", table, "--scale", "smoke", "--store", store)
    said = run_program(*asked, "--on", "ray", cwd=tmp_path)
    assert said.code == 0, said.err
    assert "[3/3]" in said.err
    kept = IndexedStore(store)
    assert gathered(plan_study(table, "smoke", kept), kept) == whole


@pytest.mark.slow
def test_several_workers_come_to_the_same(whole: Outcome, table: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    said = run_program("study", "run", table, "--scale", "smoke", "--store", store, "--workers", "2", cwd=tmp_path)
    assert said.code == 0, said.err
    kept = IndexedStore(store)
    assert gathered(plan_study(table, "smoke", kept), kept) == whole


@pytest.mark.slow
def test_two_processes_share_the_work(whole: Outcome, table: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    asked = program("study", "run", table, "--scale", "smoke", "--store", store)
    both = [
        subprocess.Popen(asked, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=PATIENCE)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    kept = IndexedStore(store)
    assert gathered(plan_study(table, "smoke", kept), kept) == whole


def test_it_takes_no_time_to_see_that_all_is_done(whole: Outcome, table: Path, tmp_path: Path) -> None:
    store = IndexedStore(tmp_path / "store")
    run(table, store)
    plan = plan_study(table, "smoke", store)
    assert plan.estimates.kept == plan.estimates.results == 3
    assert plan.estimates.seconds == 0
