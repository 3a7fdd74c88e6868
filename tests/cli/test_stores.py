"""`fedveil store`: listed, pruned, named or found; an audit without one keeps nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli.main import app, run
from fedveil.cli.stores import store_of

AUDIT = (
    "audit --data digits --model mlp:hidden=[8] --limit 60 --clients 2 --rounds 0 --victims 2 --candidates 5 --quiet"
)
QUICK = f"{AUDIT} --attack inverting-gradients:steps=2 --reference none"


def call(line: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, line.split())
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDVEIL_STORE", raising=False)
    return tmp_path


def test_a_store_is_the_one_named_that_of_the_environment_or_the_one_beside_the_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert store_of(None).folder == Path("fedveil-out/store")
    monkeypatch.setenv("FEDVEIL_STORE", "elsewhere")
    assert store_of(None).folder == Path("elsewhere")
    assert store_of(Path("named")).folder == Path("named")
    assert store_of(Path("none")).folder is None


def test_what_audits_keep_is_listed_and_pruned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUICK.split(), "--out", "one"]) == 0
    told = call("store list")[1]
    assert "link, ceiling, digits, mlp, 2 updates" in told
    entries = json.loads(call("store list --json")[1])
    assert {entry["stage"] for entry in entries} == {"observe", "attack", "score"}
    assert told.splitlines()[-1].startswith(f"{len(entries)} entries, ")
    assert call("store prune --unused-for 1") == (0, "removed 0 entries, 0 B\n")
    assert call("store prune --unused-for 0")[1].startswith(f"removed {len(entries)} entries, ")
    assert json.loads(call("store list --json")[1]) == []


def test_an_audit_without_a_store_keeps_nothing(folder: Path) -> None:
    assert run([*QUICK.split(), "--out", "one", "--store", "none"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["one"]


def test_a_run_says_where_its_store_lies(folder: Path) -> None:
    assert run([*QUICK.split(), "--out", "one", "--store", "kept"]) == 0
    assert f'store = "{folder / "kept"}"' in (folder / "one/config.toml").read_text(encoding="utf-8")


def test_a_store_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "list"]) == 2
    assert capsys.readouterr().err == "fedveil: there is no store at fedveil-out/store: name it with --store\n"
    assert run(["store", "prune"]) == 2
