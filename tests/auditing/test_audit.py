"""A whole audit, small: what it finds, keeps and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.auditing.outcome import Outcome
from fedveil.auditing.result import Document, Estimate, load_result
from fedveil.errors import FedveilError
from fedveil.tasks.task import label_table

ATTACK = "inverting-gradients:steps=60"


@pytest.fixture(scope="module")
def task() -> fv.Task:
    return fv.task("digits", model="mlp:hidden=[32],activation=sigmoid", clients=4)


@pytest.fixture(scope="module")
def outcome(task: fv.Task) -> Outcome:
    return fv.audit(
        task,
        "gradient-dropout:keep=0.6",
        ATTACK,
        federation=fv.Federation(rounds=2, batch_size=32),
        settings=fv.Audit(victims=6, rounds=(1, 2)),
        backend="stacked",
    )


def test_the_table_has_every_row_with_intervals(outcome: Outcome) -> None:
    roles = [row.role for row in outcome.result.rows]
    assert roles == ["ceiling", "naive", "adaptive", "noise-floor", "mean-floor"]
    for row in outcome.result.rows:
        for name, value in row.metrics.items():
            assert value.low <= value.mean <= value.high, (row.role, name)
            assert value.count == 12  # victims of both rounds
            assert len(row.values[name]) == 12
    assert sum(row.strongest for row in outcome.result.rows) == 1
    assert outcome.leakage["ceiling", "psnr"].mean > outcome.leakage["mean-floor", "psnr"].mean


def test_it_says_who_holds_what(outcome: Outcome, task: fv.Task) -> None:
    held = outcome.result.holdings
    assert held is not None
    assert held.sizes == [len(places) for places in task.clients]
    assert held.counts == label_table(task)
    assert (held.labels, held.partition, held.several) == ([*"0123456789"], "iid", False)


def test_cost_is_measured_on_the_same_test_examples(outcome: Outcome) -> None:
    cost = outcome.result.cost
    assert cost.defended is not None
    assert cost.undefended is not None
    assert cost.difference is not None
    assert cost.difference.mean == pytest.approx(cost.defended.mean - cost.undefended.mean)
    assert [each.round for each in cost.history] == [0, 1, 2]
    assert cost.bytes_per_round["up"] > 0


def test_the_attack_is_described(outcome: Outcome) -> None:
    (run,) = outcome.result.attacks
    assert run.traces[0].steps[-1] == 60
    assert set(run.ssim_at["ceiling"]) == {"1/3", "2/3", "all"}
    assert run.label_recovery is None
    assert outcome.result.defense.facts["measured cosine to the true update"]
    assert not outcome.result.defense.formal


def test_saving_and_loading(outcome: Outcome, tmp_path: Path) -> None:
    outcome.save(tmp_path)
    result, images = load_result(tmp_path)
    assert result.model_dump_json() == outcome.result.model_dump_json()
    assert np.array_equal(images.originals, outcome.images.originals)
    assert images.reconstructions.keys() == outcome.images.reconstructions.keys()
    (tmp_path / "result.json").write_text(json.dumps({"format": "something"}))
    with pytest.raises(FedveilError, match="not a fedveil result"):
        load_result(tmp_path)
    with pytest.raises(FedveilError, match="holds no result"):
        load_result(tmp_path / "nothing")


def test_documents_keep_what_is_not_a_number() -> None:
    class Holder(Document):
        estimate: Estimate

    held = Holder(estimate=Estimate(mean=math.nan, low=-math.inf, high=math.inf, count=1))
    back = Holder.model_validate_json(held.model_dump_json())
    assert math.isnan(back.estimate.mean)
    assert back.estimate.low == -math.inf


def test_same_seed_same_result(task: fv.Task) -> None:
    def numbers() -> list[dict[str, list[float]]]:
        found = fv.audit(
            task, "gaussian-noise", ATTACK, settings=fv.Audit(victims=2), train=False, seed=5, backend="stacked"
        )
        return [row.values for row in found.result.rows]

    assert numbers() == numbers()


def test_without_a_defense(task: fv.Task) -> None:
    found = fv.audit(task, None, ATTACK, settings=fv.Audit(victims=4, source="test"), train=False, backend="stacked")
    assert [row.role for row in found.result.rows] == ["ceiling", "noise-floor", "mean-floor"]
    assert found.result.cost.rounds == 0
    assert found.result.verdict.sentences[0].startswith("Without a defense, an attacker picks")


def test_labels_are_read_off(task: fv.Task) -> None:
    attack = fv.InvertingGradients(steps=5, labels="recovered")
    settings = fv.Audit(victims=4, batch_size=4)
    found = fv.audit(task, "clip", attack, settings=settings, train=False, backend="stacked")
    (run,) = found.result.attacks
    assert run.label_recovery is not None
    assert run.label_recovery.mean > 0.5
    assert found.images.originals.shape[0] == 16


@pytest.mark.parametrize("local_steps", ["unrolled", "pseudo-gradient"])
def test_fedavg(task: fv.Task, local_steps: str) -> None:
    federation = fv.Federation(protocol="fedavg", rounds=1, batch_size=1, local_epochs=2, lr=0.05)
    settings = fv.Audit(victims=2, batch_size=2, local_steps=local_steps)  # type: ignore[arg-type]
    found = fv.audit(task, "gradient-dropout", ATTACK, federation=federation, settings=settings, backend="stacked")
    words = {each.switch: each.setting for each in found.result.assumptions}
    assert words["local steps"] == local_steps
    assert found.leakage["ceiling", "psnr"].mean > found.leakage["noise-floor", "psnr"].mean


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_own_model_with_batch_norm_and_dropout_says_what_was_assumed() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 1, 8, 8, generator=generator)
    task = fv.Task(model=Dropping(), data=(images, torch.arange(200) % 10), clients=2)
    found = fv.audit(task, "clip", ATTACK, settings=fv.Audit(victims=2, batch_size=4), train=False, backend="stacked")
    words = {each.switch: each.setting for each in found.result.assumptions}
    assert words["batch-norm statistics"] == "not known"
    assert words["dropout masks"] == "not known"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": fv.Audit(rounds=(3,)), "train": False}, "cannot be attacked without training"),
        ({"settings": fv.Audit(rounds=(99,))}, "trains 10 rounds"),
        ({"attack": "idlg", "settings": fv.Audit(batch_size=2)}, "batch of 1"),
        ({"attack": []}, "needs an attack"),
        ({"attack": ["dlg", "dlg"]}, "named once"),
        ({"attack": "inverting-gradient"}, "did you mean 'inverting-gradients'"),
        ({"defense": "clip:norm=-1"}, "norm must be greater than 0"),
        ({"settings": fv.Audit(source="test", victims=10_000)}, "leave no test examples"),
    ],
)
def test_refused_before_any_work(task: fv.Task, change: dict[str, object], message: str) -> None:
    with pytest.raises(FedveilError, match=message):
        fv.audit(task, **change)  # type: ignore[arg-type]


def test_inputs_that_are_no_pictures_are_refused() -> None:
    labels = torch.arange(100) % 2
    flat = fv.Task(model=nn.Linear(5, 2), data=(torch.rand(100, 5), labels), clients=2)
    with pytest.raises(FedveilError, match="scores images"):
        fv.audit(flat)
    wild = fv.Task(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), data=(10 * torch.randn(100, 1, 8, 8), labels))
    with pytest.raises(FedveilError, match="not pixels"):
        fv.audit(wild)


def test_a_finished_attack_is_not_run_again(task: fv.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fv.Audit(victims=2, reference="none")

    def audit(resume: bool, seed: int = 0) -> list[dict[str, list[float]]]:
        found = fv.audit(
            task,
            "clip",
            ATTACK,
            settings=settings,
            train=False,
            folder=tmp_path,
            resume=resume,
            seed=seed,
            backend="stacked",
        )
        return [row.values for row in found.result.rows]

    first = audit(resume=False)
    runs = []
    real = fv.InvertingGradients.run

    def counted(self, *given, **named):  # type: ignore[no-untyped-def]
        runs.append(1)
        return real(self, *given, **named)

    monkeypatch.setattr(fv.InvertingGradients, "run", counted)
    assert audit(resume=True) == first
    assert not runs
    audit(resume=True, seed=1)  # another configuration
    assert runs
    (path,) = (tmp_path / "attacks").iterdir()
    path.write_bytes(path.read_bytes()[:-100])  # damaged: run again
    assert audit(resume=True) == first
