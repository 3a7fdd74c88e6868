"""`fedveil audit` and `fedveil train`."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from typing import Any

import safetensors.torch

from fedveil.auditing.asked import Asked
from fedveil.auditing.check import check as check_audit
from fedveil.auditing.outcome import Outcome
from fedveil.auditing.result import load_result
from fedveil.auditing.run import audit
from fedveil.cli.config import Config
from fedveil.cli.display import Display
from fedveil.cli.folder import CONFIG, Claim, claimed
from fedveil.cli.options import Given
from fedveil.federation.exposure import ledger_of
from fedveil.federation.observers import Observer
from fedveil.federation.run import Run, checked_plan, federate
from fedveil.files import write_atomically
from fedveil.ledger.statement import Statement
from fedveil.tasks.task import Task
from fedveil.workers import Workers, pack

THRESHOLDS = ("exposed_above", "smallest_gain", "rule_out", "recognizable_ssim", "large_drop")
FAILED = 3  # the exit code of a finding that --fail-if names


def run_audit(given: Given) -> int:
    """Everything that can be wrong is found before the folder's contents are touched and before long work starts."""
    config = Config.read("audit", given)
    with claimed(config, given.config, resume=given.resume) as place:
        return _run_audit(config, place)


def _run_audit(config: Config, place: Claim) -> int:
    if place.finished:
        return _show_audit(Outcome(*load_result(place.path)), place, config)
    task = config.build_task()
    check_audit(Asked(task, config.chain, tuple(config.attack), config.federation, config.audit, train=config.trains))
    display = Display(quiet=config.quiet, resumes=place.resumes)
    command = _command(config, place)

    def stage(line: str) -> None:
        place.begin(config)  # the first stage comes after all that an audit checks
        display.stage(line)

    with display.running(lambda: _to_go_on(config, place)), config.pool() as pool:
        _check_training(config, task, pool)
        outcome = audit(
            task,
            config.chain,
            config.attack,
            federation=config.federation,
            settings=config.audit,
            seed=config.seed,
            backend=config.backend,
            device=config.device,
            folder=place.path,
            resume=place.resumes,
            train=config.trains,
            watch=dataclasses.replace(display.watch(), stage=stage),
            progress=False,
            command=command,
            workers=pool,
        )
        outcome.save(place.path)
        return _show_audit(outcome, place, config)


def _show_audit(outcome: Outcome, place: Claim, config: Config) -> int:
    """Write the report, print the findings; returns the exit code."""
    report = outcome.report(place.path / "report.html")
    result = outcome.result
    if config.as_json:
        used = result.provenance.config
        settings = used.get("audit", {})
        summary = {
            "version": result.provenance.versions.get("fedveil"),
            "data": result.data,
            "model": result.model,
            "task": used.get("task", {}),
            "protocol": result.protocol,
            "seed": result.provenance.seed,
            "defense": used.get("defense", []),
            "attack": used.get("attack", []),
            "federation": used.get("federation", {}),
            "attacked_rounds": settings.get("rounds"),
            "thresholds": {name: settings.get(name) for name in THRESHOLDS},
            "guarantee": result.defense.guarantee,
            "status": result.verdict.status,
            "sentences": result.verdict.sentences,
            "why": result.verdict.why,
            "warnings": [warning.words for warning in result.verdict.warnings],
            "next_step": result.verdict.next_step,
            "next_command": result.verdict.command,
            "rows": [row.model_dump(exclude={"values"}) for row in result.rows],
            "identified_among": result.identified_among,
            "cost": result.cost.model_dump(exclude={"history"}),
            "seconds": result.provenance.seconds,
            "out": str(place.path),
            "report": str(report),
        }
        print(json.dumps(summary, indent=1, ensure_ascii=False))
    else:
        print(outcome.leakage)
        print("* the strongest attacker\n")
        print("\n".join(result.verdict.sentences))
        for warning in sorted(result.verdict.warnings, key=lambda each: not each.loud):
            print(f"{'WARNING' if warning.loud else 'Note'}: {warning.words}")
        print(f"\nThe report is {report}\nResult: {result.verdict.status}. {result.verdict.why}")
        if result.verdict.next_step:
            print(
                f"Next: {result.verdict.next_step}"
                + (f"\n  {result.verdict.command}" if result.verdict.command else "")
            )
    if result.verdict.status.replace(" ", "-") not in config.fail_if:
        return 0
    print(f"fedveil: failed, as --fail-if names '{result.verdict.status}'", file=sys.stderr)
    return FAILED


def run_train(given: Given) -> None:
    """Train, and keep the model, its history and what was captured."""
    config = Config.read("train", given)
    with claimed(config, given.config, resume=given.resume) as place:
        _run_train(config, place)


def _run_train(config: Config, place: Claim) -> None:
    task = config.build_task()
    display = Display(quiet=config.quiet, resumes=place.resumes)
    with display.running(lambda: _to_go_on(config, place)), config.pool() as pool:
        _check_training(config, task, pool)
        display.stage(f"training under {config.chain}" if config.defense else "training")
        run = federate(
            task,
            config.chain,
            config.federation,
            seed=config.seed,
            backend=config.backend,
            device=config.device,
            observers=(_Begins(config, place), *display.watch().observers),
            progress=False,
            folder=place.path,
            resume=place.resumes,
            workers=pool,
        )
        promised = ledger_of(task, config.federation, config.chain, run.history).statement()
        _save_run(run, task, place, promised)
    _show_run(run, place, config, promised)


class _Begins(Observer):
    """The folder's contents are this run's from the first round on, when nothing can be refused any more."""

    def __init__(self, config: Config, place: Claim) -> None:
        self._config, self._place = config, place

    def on_start(self, *told: object) -> None:
        self._place.begin(self._config)


def _check_training(config: Config, task: Task, pool: Workers) -> None:
    """Refuse what the federation would refuse, and what processes that attack would."""
    attacks_only = config.command == "audit" and config.federation.protocol == "fedsgd"
    with Workers(1) as one:
        checked_plan(
            task,
            config.chain,
            config.federation,
            seed=config.seed,
            backend=config.backend,
            device=config.device,
            workers=one if attacks_only else pool,
        )
    if pool.forced:
        pack((task.model, task.loss, config.chain, config.attack))


def _to_go_on(config: Config, place: Claim) -> str:
    """What to type after a stop, if the run has begun."""
    return f"{_command(config, place)} --resume" if place.begun else ""


def _save_run(run: Run, task: Task, place: Claim, promised: Statement) -> None:
    """The model as a state dict, and the history, which says that the run is finished."""
    state = {**task.model.state_dict(), **run.params, **run.buffers}
    apart = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    write_atomically(place.path / "model.safetensors", safetensors.torch.save(apart))
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
    accuracy = "" if run.utility.test is None else f": test {run.utility.metric} {run.utility.test:.1%}"
    print(f"Round {run.chosen_round} of {len(run.history)}{stopped}{accuracy}")
    print(promised.paragraph if promised.formal else promised.sentence)
    if run.captured:
        print(
            f"Captured updates: {len(run.captured)} in {place.path / 'captures'}, the truth in {place.path / 'truths'}"
        )
    print(f"The model is {place.path / 'model.safetensors'}")


def _command(config: Config, place: Claim) -> str:
    return f"fedveil {config.command} --config {shlex.quote(str(place.path / CONFIG))}"
