"""docs/nvflare.md is true: its code runs, NVFlare takes its policy, its commands are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, assert_links_lead_to_files, blocks, checked_audit

TEXT = (ROOT / "docs" / "nvflare.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    scope: dict[str, Any] = {}
    (code,) = blocks(TEXT, "python")
    exec(compile(code, "nvflare.md", "exec"), scope)
    scope["job"].export_job(str(tmp_path))
    (path,) = tmp_path.rglob("config_fed_client.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    assert [config[f"task_{which}_filters"][0]["tasks"] for which in ("data", "result")] == [["train"], ["train"]]


def test_nvflare_takes_the_policy(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from nvflare.apis.workspace import Workspace
    from nvflare.private.fed.app.fl_conf import create_privacy_manager

    from fedveil.nvflare import ProtectFilter, ReceiveFilter

    (policy,) = blocks(TEXT, "json")
    for folder in ("local", "startup"):
        (tmp_path / folder).mkdir()
    (tmp_path / "local" / "privacy.json").write_text(policy, encoding="utf-8")
    manager = create_privacy_manager(Workspace(str(tmp_path), "site-1"), names_only=False)
    scope = manager.get_scope(None)
    assert [type(each) for each in scope.task_data_filters["in"]] == [ReceiveFilter]
    (protect,) = scope.task_result_filters["out"]
    assert isinstance(protect, ProtectFilter)
    assert protect.defense == "dp-gaussian:epsilon=1,delta=1e-5,at=upload"


def test_the_commands_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for block in blocks(TEXT, "sh") for line in block.splitlines()]
    (audit,) = (line for line in lines if line.startswith("fedveil audit"))
    checked_audit(audit, monkeypatch)
    assert "python job.py --workspace /tmp/digits" in lines  # tests/nvflare_sites/test_simulator.py runs it


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
