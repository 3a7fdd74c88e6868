"""docs/deploy.md is true: its policy is one, its table is complete, its commands are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedveil.cli.main import run
from fedveil.fields import field_names
from fedveil.flower.site.policy import Policy
from pages import ROOT, assert_links_lead_to_files, blocks

TEXT = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def test_the_policy_can_be_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (policy,) = blocks(TEXT, "toml")
    (tmp_path / "policy.toml").write_text(policy)
    lines = [line for block in blocks(TEXT, "console") for line in block.splitlines()]
    check, supernode, wrapper = (line for line in lines if line.startswith("fedveil"))
    assert run(shlex.split(check)[1:]) == 0
    assert "Every update leaves under clip:at=upload+gaussian-noise" in capsys.readouterr().out
    given = []
    monkeypatch.setattr("fedveil.flower.site.supernode.run_supernode", lambda *told: given.append(told))
    assert run(shlex.split(supernode)[1:]) == 0
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    assert run(shlex.split(wrapper)[1:]) == 0
    (superexec,) = (line for line in lines if "flower-superexec" in line)
    assert superexec.startswith("PATH=$PWD/bin:$PATH")
    assert (tmp_path / "bin/flwr-clientapp").stat().st_mode & 0o111
    from flwr.supercore.cli.flower_superexec import _parse_args as superexec_options

    monkeypatch.setattr("sys.argv", shlex.split(superexec)[1:])
    assert superexec_options().parse_args().insecure
    ((path, arguments),) = given
    assert path == Path("policy.toml")
    assert _parse_args_run_supernode().parse_args(arguments).superlink == "superlink.example:8000"


def test_the_table_names_every_field() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", TEXT, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(field_names(Policy)) <= told


def test_links_lead_to_files() -> None:
    assert_links_lead_to_files(TEXT, ROOT / "docs")
