"""`fedveil audit` and `fedveil train`."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from typing import TYPE_CHECKING, Any

from fedveil.cli.config import Config
from fedveil.cli.display import FAILED, Display
from fedveil.cli.folder import CONFIG, Claim, claimed
from fedveil.cli.options import Given
from fedveil.cli.stores import store_of
from fedveil.federation.exposure import ledger_of
from fedveil.federation.observers import Observer
from fedveil.federation.plan import Plan
from fedveil.federation.prepare import prepare
from fedveil.federation.run import Run, train
from fedveil.files import write_atomically
from fedveil.ledger.statement import Statement
from fedveil.tasks.measures import measure
from fedveil.tasks.task import Task
from fedveil.tensors import write_safetensors
from fedveil.workers import pack

if TYPE_CHECKING:
    from fedveil.auditing.audit_result import AuditResult

# What judges and attacks is imported where an audit begins: `fedveil train` starts a second sooner without it.


def run_audit(given: Given) -> int:
    """Everything that can be wrong is found before the folder's contents are touched and before long work starts."""
    config = Config.load("audit", given)
    with claimed(config, given.config, resume=given.resume) as place:
        return _run_audit(config, place)


def _run_audit(config: Config, place: Claim) -> int:
    from fedveil.auditing.audit_result import AuditResult
    from fedveil.auditing.result import load_result
    from fedveil.auditing.run import run_audit as carry_out
    from fedveil.auditing.workshop import Workshop

    if place.finished:
        return _show_audit(AuditResult(*load_result(place.path)), place, config)
    display = Display(quiet=config.quiet, resumes=place.resumes)

    def stage(line: str) -> None:
        place.begin(config)  # the first stage comes after all that an audit checks
        display.stage(line)

    with display.running(lambda: _to_go_on(config, place)), config.pool() as pool:
        watch = dataclasses.replace(display.watch(), stage=stage)
        shop = Workshop.open(config, store_of(config.store), pool, watch)
        if pool.forced:
            pack((shop.task.model, shop.task.loss, config.chain, shop.lineup.attacks))
        outcome = carry_out(shop, _command(config, place))
        outcome.save(place.path)
        return _show_audit(outcome, place, config)


def _show_audit(outcome: AuditResult, place: Claim, config: Config) -> int:
    """Write the report, print the findings; returns the exit code."""
    from fedveil.cli.findings import print_findings, print_json, summary

    report, result = outcome.report(place.path / "report.html"), outcome.result
    if config.as_json:
        print_json(summary(outcome) | {"out": str(place.path), "report": str(report)})
    else:
        print_findings(outcome, report)
    if result.verdict.status.replace(" ", "-") not in config.fail_if:
        return 0
    print(f"fedveil: failed, as --fail-if names '{result.verdict.status}'", file=sys.stderr)
    return FAILED


def run_train(given: Given) -> None:
    """Train, and keep the model, its history and what was captured."""
    config = Config.load("train", given)
    with claimed(config, given.config, resume=given.resume) as place:
        _run_train(config, place)


def _run_train(config: Config, place: Claim) -> None:
    task = config.build_task()
    display = Display(quiet=config.quiet, resumes=place.resumes)
    with display.running(lambda: _to_go_on(config, place)), config.pool() as pool:
        plan = Plan(task, config.chain, config.federation, config.seed)
        prepared = prepare(plan, backend=config.backend, device=config.device, workers=pool)
        if pool.forced:
            pack((task.model, task.loss, config.chain))
        display.stage(f"training under {config.chain}" if config.defense else "training")
        run = train(
            prepared,
            folder=place.path,
            resume=place.resumes,
            observers=(_Begins(config, place, prepared.engine.backend), *display.watch().observers),
        )
        promised = ledger_of(task, config.federation, config.chain, run.history).statement()
        _save_run(run, task, place, promised)
    _show_run(run, place, config, promised)


class _Begins(Observer):
    """The folder's contents are this run's from the first round on, when nothing can be refused any more."""

    def __init__(self, config: Config, place: Claim, backend: str) -> None:
        self._config, self._place, self._backend = config, place, backend

    def on_start(self, *told: object) -> None:
        self._place.begin(self._config, self._backend)


def _to_go_on(config: Config, place: Claim) -> str:
    """What to type after a stop, if the run has begun."""
    return f"{_command(config, place)} --resume" if place.begun else ""


def _save_run(run: Run, task: Task, place: Claim, promised: Statement) -> None:
    """The model as a state dict, and the history, which says that the run is finished."""
    state = {**task.model.state_dict(), **run.params, **run.buffers}
    write_safetensors(place.path / "model.safetensors", state)
    history = {
        "untrained": run.untrained.model_dump(),
        "history": [record.model_dump() for record in run.history],
        **_summary(run, promised),
    }
    write_atomically(place.path / "history.json", json.dumps(history, indent=1).encode())


def _summary(run: Run, promised: Statement) -> dict[str, Any]:
    return {
        "rounds": len(run.history),
        "chosen_round": run.chosen_round,
        "early_stopped": run.early_stopped,
        "utility": run.utility.model_dump(),
        "train_loss": run.history[-1].train_loss,
        "backend": run.backend,
        "captures": len(run.captured),
        "guarantee": {name: _finite(value) for name, value in dataclasses.asdict(promised).items()},
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity; the sentence says it."""
    return None if isinstance(value, float) and math.isinf(value) else value


def _show_run(run: Run, place: Claim, config: Config, promised: Statement) -> None:
    if config.as_json:
        model = str(place.path / "model.safetensors")
        print(json.dumps({**_summary(run, promised), "out": str(place.path), "model": model}, indent=1))
        return
    stopped = ", stopped early" if run.early_stopped else ""
    utility = f": test {run.utility.told}" if run.utility.told else ""
    others = "".join(f", {name} {measure(name).shown(value)}" for name, value in run.utility.others.items())
    print(f"Round {run.chosen_round} of {len(run.history)}{stopped}{utility}{others}")
    print(promised.paragraph if promised.formal else promised.sentence)
    if run.captured:
        print(
            f"Captured updates: {len(run.captured)} in {place.path / 'captures'}, the truth in {place.path / 'truths'}"
        )
    print(f"The model is {place.path / 'model.safetensors'}")


def _command(config: Config, place: Claim) -> str:
    return f"fedveil {config.command} --config {shlex.quote(str(place.path / CONFIG))}"
