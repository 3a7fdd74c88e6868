"""Preparing a run: checked once, with an engine that serves several runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation import prepare as preparing
from fedveil.federation.plan import Plan
from fedveil.federation.prepare import engine_for, prepare, run_seconds
from fedveil.federation.run import federate, train
from fedveil.federation.settings import FederationSettings

from .small import Feedback, Noted, assert_rows_equal, small_task

FEDSGD = FederationSettings(rounds=2, batch_size=5)
FEDAVG = FederationSettings(protocol="fedavg", rounds=2, batch_size=5, local_epochs=2, local_utility=1)


def test_an_engine_as_a_run_would_use_it() -> None:
    task = small_task()
    task.model.eval()
    engine = engine_for(task, FEDSGD, backend="stacked")
    assert engine.model.training
    assert engine.chunk == 4


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_one_engine_serves_a_run_with_the_defense_and_one_without(settings: FederationSettings, backend: Any) -> None:
    task = small_task(sizes=(13, 8, 19), buffers="local")
    plain = prepare(Plan(task, Chain(), settings, 3), backend=backend)
    defended = prepare(Plan(task, Chain.of(Feedback()), settings, 3), engine=plain.engine)
    assert defended.engine is plain.engine
    for at, defense in ((plain, None), (defended, Feedback()), (plain, None)):
        alone = federate(task, defense, settings, seed=3, backend=backend)
        run = train(at)
        assert_rows_equal(run.params, alone.params)
        assert_rows_equal(run.buffers, alone.buffers)
        assert run.backend == backend


def test_checks_engine_and_dry_step_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *given, **named: made.append(name) or function(*given, **named)

    monkeypatch.setattr(preparing, "dry_step", counted("dry step", preparing.dry_step))
    monkeypatch.setattr(preparing, "engine_for", counted("engine", preparing.engine_for))
    monkeypatch.setattr(Plan, "check", counted("check", Plan.check))
    monkeypatch.setattr(Engine, "__init__", counted("made", Engine.__init__))
    task = small_task(norm=False)
    at = prepare(Plan(task, Chain.of("gradient-dropout"), FEDSGD), backend="loop")
    assert sorted(made) == ["check", "dry step", "engine", "made"]
    for _ in range(2):
        train(at)
    prepare(Plan(task, Chain(), FEDSGD), engine=at.engine)
    assert sorted(made[4:]) == ["check", "dry step"]


def test_a_plan_that_cannot_work_is_refused_before_an_engine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "engine_for", lambda *_, **__: pytest.fail("an engine was chosen"))
    with pytest.raises(FedveilError, match="ldp-fl protects weights"):
        prepare(Plan(small_task(), Chain.of("ldp-fl"), FEDSGD))


def test_a_run_compiles_for_its_own_batches_whatever_its_engine_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "fedveil.clients.engine.compile_once",
        lambda function, name: lambda *given: shapes.append(tuple(given[4].shape)) or function(*given),
    )
    monkeypatch.setattr("fedveil.clients.engine.packaged", lambda *_, **__: None)
    monkeypatch.setattr("fedveil.clients.engine.compiler_found", lambda: True)
    task = small_task(norm=False, sizes=(12, 12))
    engine = Engine(task.model, task.loss, backend="compiled", chunk=2)
    for size in (6, 4, 6):
        train(prepare(Plan(task, Chain(), FederationSettings(rounds=1, batch_size=size)), engine=engine))
    assert shapes == [(2, 6)] * 2 + [(2, 4)] * 3 + [(2, 6)] * 2


def test_a_resumed_run_computes_as_before_whatever_was_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Noted):
        def on_round_end(self, record: object) -> None:
            raise KeyboardInterrupt

    task = small_task(norm=False)
    first = prepare(Plan(task, Chain.of(Feedback()), FEDSGD), engine=Engine(task.model, task.loss, chunk=3))
    whole = train(first)
    with pytest.raises(KeyboardInterrupt):
        train(first, folder=tmp_path, observers=[Stop()])
    other = prepare(first.plan, engine=Engine(task.model, task.loss, backend="loop"))
    used: list[tuple[str, int]] = []
    gradient = Engine.gradient

    def watched(self: Engine, *given: Any) -> Any:
        used.append((self.backend, self.chunk))
        return gradient(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "gradient", watched)
        resumed = train(other, folder=tmp_path, resume=True)
    assert set(used) == {("stacked", 3)}
    assert resumed.backend == "stacked"
    assert_rows_equal(resumed.params, whole.params)
    forced = prepare(first.plan, backend="loop")
    with pytest.raises(FedveilError, match="the run was made on the backend stacked"):
        train(forced, folder=tmp_path, resume=True)
    with pytest.raises(FedveilError, match="resume needs the folder"):
        train(first, resume=True)


@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("defense", ["gaussian-noise", Feedback(), "dp-sgd"], ids=str)
def test_what_is_recorded_changes_nothing_else(settings: FederationSettings, defense: Any) -> None:
    task = small_task(norm=False)
    runs = [
        federate(task, defense, replace(settings, **recorded), backend="stacked")
        for recorded in ({}, {"record_rounds": (1, 2)}, {"record_rounds": (2,), "record_clients": 1})
    ]
    assert [len(run.captured) for run in runs] == [0, 8, 1]
    for run in runs[1:]:
        assert_rows_equal(run.params, runs[0].params)
        assert torch.equal(run.values, runs[0].values)  # type: ignore[arg-type]
        assert [_told(record) for record in run.history] == [_told(record) for record in runs[0].history]


def _told(record: Any) -> dict[str, Any]:
    return record.model_dump(exclude={"seconds", "perturbation"})  # type: ignore[no-any-return]


def test_the_estimate_of_a_run_counts_its_evaluations() -> None:
    task, often = small_task(), replace(FEDAVG, rounds=100)
    rarely = replace(often, evaluate_every=100)
    assert run_seconds(task, often) > run_seconds(task, rarely) > run_seconds(task, replace(rarely, rounds=50))
    longer = run_seconds(task, replace(often, rounds=200)) - run_seconds(task, often)
    assert longer == pytest.approx(
        run_seconds(task, replace(often, rounds=300)) - run_seconds(task, replace(often, rounds=200))
    )
