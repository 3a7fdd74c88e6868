"""A new user audits: files, words and numbers; again from the file; with FedAvg; with a model of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv

from .console import QUICK, SMALL, Fedveil, files, refused


def rows(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "result.json").read_text(encoding="utf-8"))["rows"]
    return found


def test_a_new_user_audits_and_repeats_it_from_the_file(fedveil: Fedveil, tmp_path: Path) -> None:
    said = fedveil("audit", *QUICK, "--defense", "gradient-dropout:keep=0.6", "--out", "first")
    assert said.code == 0, said.err
    first = tmp_path / "first"
    assert files(first) == [
        "config.toml",
        "images.safetensors",
        "report.html",
        "result.json",
    ]
    result = json.loads((first / "result.json").read_text(encoding="utf-8"))
    assert {row["role"] for row in result["rows"]} == {"ceiling", "naive", "adaptive", "noise-floor", "mean-floor"}
    assert result["provenance"]["command"] == "fedveil audit --config first/config.toml"
    assert result["cost"]["rounds"] == 2
    for sentence in result["verdict"]["sentences"]:
        assert sentence in said.out
    lines = said.out.splitlines()
    report = lines.index("The report is first/report.html")
    assert lines[report + 1].startswith(f"Result: {result['verdict']['status']}. ")
    step, command = (result["verdict"][name] for name in ("next_step", "command"))
    assert lines[report + 2 :] == ([f"Next: {step}", f"  {command}"] if step else [])
    for warning in result["verdict"]["warnings"]:
        assert f"{'WARNING' if warning['loud'] else 'Note'}: {warning['words']}" in lines[:report]
    assert result["verdict"]["status"] in (first / "report.html").read_text(encoding="utf-8")
    assert "training under gradient-dropout:keep=0.6" in said.err
    assert "training: round 2/2" in said.err
    assert "attacking with inverting-gradients" in said.err

    again = fedveil("audit", "--config", "first/config.toml", "--out", "second", "--json", "--quiet")
    assert (again.code, again.err) == (0, "")
    summary = json.loads(again.out)  # nothing else is there
    assert summary["status"] == result["verdict"]["status"]
    assert summary["report"] == "second/report.html"
    assert rows(tmp_path / "second") == rows(first)
    assert (tmp_path / "second/config.toml").read_bytes() == (first / "config.toml").read_bytes()

    # A finished run is shown again, not made again.
    before = (first / "result.json").stat().st_mtime_ns
    shown = fedveil("audit", "--config", "first/config.toml", "--resume")
    assert (shown.code, shown.out) == (0, said.out)
    assert (first / "result.json").stat().st_mtime_ns == before

    # The report alone, from what was kept.
    (first / "report.html").unlink()
    assert fedveil("report", "first").out == "first/report.html\n"
    assert fedveil("report", "first", "--path", "other/page.html").code == 0
    assert (tmp_path / "other/page.html").read_bytes() == (first / "report.html").read_bytes()

    refused(
        fedveil("audit", *QUICK, "--defense", "gradient-dropout:keep=0.6", "--out", "first"),
        "holds the finished run of this configuration",
        "--overwrite",
    )
    refused(
        fedveil("audit", *QUICK, "--out", "first"),
        "holds the finished run of another configuration",
        "choose another --out or add --overwrite",
    )
    assert fedveil("audit", *QUICK, "--rounds", "0", "--out", "first", "--overwrite").code == 0
    assert files(first) == [
        "config.toml",
        "images.safetensors",
        "report.html",
        "result.json",
    ]


def test_without_training_and_without_a_folder(fedveil: Fedveil, tmp_path: Path) -> None:
    for number in (1, 2):
        said = fedveil("audit", *QUICK, "--rounds", "0", "--quiet")
        assert said.code == 0, said.err
        assert "Cost: not measured" in said.out
        assert (tmp_path / f"fedveil-out/digits-mlp-none-{number}/report.html").is_file()


@pytest.mark.parametrize("how", ["unrolled", "pseudo-gradient"])
def test_fedavg_is_audited_too(fedveil: Fedveil, tmp_path: Path, how: str) -> None:
    said = fedveil(
        *("audit", *QUICK, "--protocol", "fedavg", "--local-epochs", "2", "--upload", "delta", "--batch-size", "2"),
        *("--attack-batch-size", "4", "--local-steps", how, "--attack-rounds", "1,2", "--out", "avg", "--quiet"),
        *("--defense", "clip:norm=1", "--json"),
    )
    assert said.code == 0, said.err
    assert {row["role"] for row in json.loads(said.out)["rows"]} >= {"ceiling", "adaptive"}
    result = json.loads((tmp_path / "avg/result.json").read_text(encoding="utf-8"))
    assert result["protocol"] == "FedAvg, 2 clients, batch 2, 2 local epochs"
    assert len(result["rows"][0]["values"]["psnr"]) == 2 * 3 * 4  # rounds, victims, examples


def test_several_attacks_and_a_chain_from_a_file(fedveil: Fedveil, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        out = "chained"
        quiet = true
        json = true
        defense = ["clip:norm=1"]
        [[attack]]
        name = "inverting-gradients"
        steps = 3
        [[attack]]
        name = "idlg"
        steps = 2
        [task]
        model = "mlp:hidden=[8]"
        limit = 60
        clients = 2
        [federation]
        rounds = 1
        [audit]
        victims = 2
        """,
        encoding="utf-8",
    )
    said = fedveil("audit", "--config", "run.toml", "--defense", "clip:norm=1+gaussian-noise:sigma=0.01")
    assert said.code == 0, said.err
    assert {row["attack"] for row in json.loads(said.out)["rows"]} == {
        "",
        "inverting-gradients",
        "idlg",
        "link",
        "all attacks together",
    }
    result = json.loads((tmp_path / "chained/result.json").read_text(encoding="utf-8"))
    assert result["defense"]["name"] == "clip + gaussian-noise"


def test_in_80_columns_nothing_is_cut_and_json_and_csv_have_everything(
    fedveil: Fedveil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    audit = ("audit", *QUICK, "--attack", "idlg:steps=2", "--defense", "clip:norm=2+gradient-dropout:keep=0.6")
    said = fedveil(*audit, "--seed", "3", "--out", "two", "--quiet")
    assert said.code == 0, said.err
    table = said.out.partition("* the strongest")[0]
    assert max(map(len, table.splitlines())) <= 80
    for words in ("inverting-gradients\n", "idlg\n", "identified", "PSNR", "SSIM", "MSE"):
        assert words in table

    again = json.loads(fedveil("audit", "--config", "two/config.toml", "--resume", "--json").out)
    assert again["version"] == fv.__version__
    assert (again["data"], again["model"], again["seed"]) == ("digits", "mlp", 3)
    assert again["task"]["model"] == "mlp:hidden=[16]"
    assert again["defense"][0] == {"name": "clip", "norm": 2.0, "order": "l2", "at": "gradient"}
    assert again["defense"][1]["sigma"] == 5e-3
    assert [each["name"] for each in again["attack"]] == ["inverting-gradients", "idlg"]
    assert again["attacked_rounds"] == [1]
    settings = json.loads((tmp_path / "two/result.json").read_text(encoding="utf-8"))["provenance"]["config"]["audit"]
    assert len(again["thresholds"]) == 5
    assert again["thresholds"].items() <= settings.items()
    assert again["federation"]["rounds"] == 2

    said = fedveil("report", "two", "--csv", "tables/two.csv")
    assert said.out.splitlines() == ["two/report.html", "tables/two.csv"]
    lines = (tmp_path / "tables/two.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + sum(len(row["metrics"]) for row in again["rows"])


def test_a_finding_can_fail_a_pipeline(fedveil: Fedveil, tmp_path: Path) -> None:
    audit = ("audit", *QUICK, "--rounds", "0", "--out", "ci", "--quiet")
    refused(fedveil(*audit, "--fail-if", "expsed"), "unknown finding 'expsed': did you mean 'exposed'?")
    assert fedveil(*audit).code == 0
    status = json.loads((tmp_path / "ci/result.json").read_text(encoding="utf-8"))["verdict"]["status"]
    word = status.replace(" ", "-")
    assert word in ("exposed", "partly-exposed", "not-judged"), "choose another audit for this test"
    others = [name for name in ("exposed", "partly-exposed", "not-judged") if name != word]
    assert fedveil(*audit, "--resume", "--fail-if", others[0], "--fail-if", others[1]).code == 0
    said = fedveil(*audit, "--resume", "--json", "--fail-if", f"{others[0]},{word}")
    assert said.code == 3
    assert json.loads(said.out)["status"] == status
    assert said.err == f"fedveil: failed, as --fail-if names '{status}'\n"
    assert fedveil(*audit, "--overwrite", "--fail-if", word).code == 3


class Net(nn.Module):
    """A user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, stride=2)
        self.head = nn.Linear(4 * 3 * 3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.features(images)).flatten(1))


def own_arrays() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.random((60, 3, 8, 8), dtype=np.float32), random.integers(0, 2, 60)


def test_a_model_and_data_of_the_users_own(tmp_path: Path) -> None:
    task = fv.Task(model=Net(), data=own_arrays(), clients=3, name="my images")
    outcome = fv.audit(
        task,
        defense=fv.defenses.GradientDropout(keep=0.8),
        attack="inverting-gradients:steps=5",
        federation=fv.FederationSettings(rounds=1),
        settings=fv.AuditSettings(victims=3, candidates=5),
        store=tmp_path / "store",
    )
    page = outcome.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "my images" in page
    assert outcome.result.verdict.status in page
    assert outcome.leakage["ceiling", "psnr"].count == 3
    assert re.search(r"^inverting-gradients\n(.*\n)*  defended, adaptive attacker", str(outcome.leakage), re.MULTILINE)


def test_bad_own_data_and_models_are_one_line() -> None:
    images, labels = own_arrays()
    images[7, 0, 0, 0] = np.nan
    with pytest.raises(fv.FedveilError, match="NaN") as caught:
        fv.Task(model=Net(), data=(images, labels))
    assert "\n" not in str(caught.value)
    with pytest.raises(fv.FedveilError, match="parameter") as caught:
        fv.Task(model=nn.Flatten(), data=own_arrays())
    assert "\n" not in str(caught.value)


def test_settings_that_cannot_work_are_refused_before_training(fedveil: Fedveil, tmp_path: Path) -> None:
    for options, words in {
        ("--victims", "500"): "use at most 120 victims",
        ("--attack-rounds", "5"): "the federation trains 2 rounds",
        ("--attack-rounds", "1,1"): "each once",
        ("--attack-rounds", ""): "must be named",
        ("--candidates", "1"): "at least 2",
        ("--warmup-rounds", "1", "--defense", "clip"): "is a warm-up round",
        ("--attack", "idlg", "--attack-batch-size", "2"): "use a batch of 1",
        ("--source", "test", "--victims", "400"): "leave no test examples",
        ("--data", "digits", "--model", "resnet18:norm=nix"): "norm must be",
    }.items():
        refused(fedveil("audit", *QUICK, "--out", "never", *options), words)
    refused(fedveil("train", *SMALL, "--patience", "1", "--split", "own:validation=0", "--out", "never"), "validation")
    assert files(tmp_path) == []
