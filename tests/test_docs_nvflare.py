"""docs/nvflare.md is true: its code runs, NVFlare takes its policy, its commands are right."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.cli.main import run
from pages import ROOT, assert_links_lead_to_files, blocks, checked_audit

JOB = (ROOT / "examples" / "nvflare" / "job.py").read_text(encoding="utf-8")
TEXT = (ROOT / "docs" / "nvflare.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    scope: dict[str, Any] = {}
    for code in blocks(TEXT, "python"):
        exec(compile(code, "nvflare.md", "exec"), scope)
    assert scope["audited"].captures["batch_sizes"] == [16]
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
    (kept,) = (line for line in lines if "--captures" in line)
    assert all(f'"{option}"' in JOB for option in kept.split() if option.startswith("--"))


def test_what_left_can_be_attacked_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.fl_context import FLContext

    from fedveil.nvflare import ReceiveFilter

    scope: dict[str, Any] = {}
    exec(compile(blocks(TEXT, "python")[1], "nvflare.md", "exec"), {"ProtectFilter": _import()}, scope)
    protect = scope["audited"]
    protect.captures["folder"] = str(tmp_path / "digits-captures")
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    before = {f"layers.{name}": tensor.numpy() for name, tensor in layers.state_dict().items()}
    site = FLContext()
    site.set_prop("__identity_name__", "site-1")
    ReceiveFilter().process(DXO(DataKind.WEIGHTS, before).to_shareable(), site)
    after = {name: array - 0.01 for name, array in before.items()}
    protect.process(DXO(DataKind.WEIGHTS, after).to_shareable(), site)
    monkeypatch.chdir(ROOT / "examples" / "nvflare")
    (command,) = (each for block in blocks(TEXT, "sh") for each in block.splitlines() if each.startswith("fedveil att"))
    words = [word.replace("/tmp/", f"{tmp_path}/") for word in shlex.split(command)[1:]]
    quick = [
        "--attack",
        "inverting-gradients:steps=2,restarts=1,polish=0",
        "--no-link",
        "--workers",
        "1",
        "--backend",
        "loop",
    ]
    assert run([*words, *quick, "--store", "none", "--out", str(tmp_path / "attacked"), "--quiet"]) == 0


def _import() -> Any:
    from fedveil.nvflare import ProtectFilter

    return ProtectFilter


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
