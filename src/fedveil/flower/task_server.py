"""The server app of `fedveil federate`."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.clients.engine import Tensors
from fedveil.errors import FedveilError
from fedveil.federation.evaluate import Evaluator
from fedveil.federation.plan import Plan
from fedveil.files import write_atomically
from fedveil.flower.server import Outcome, Server
from fedveil.flower.task_settings import TaskRun
from fedveil.tasks.task import Task
from fedveil.tensors import write_safetensors

log = logging.getLogger(__name__)
OUTCOME, ERROR = "outcome.json", "error.txt"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds, then the model and a summary. What goes wrong is left in a file: Flower tells its starter nothing."""
    run = TaskRun.of_run(context.run_config)
    run.out.mkdir(parents=True, exist_ok=True)
    for name in (OUTCOME, ERROR):
        (run.out / name).unlink(missing_ok=True)
    try:
        federate(run, grid)
    except FedveilError as error:
        write_atomically(run.out / ERROR, str(error).encode())
        raise


def federate(run: TaskRun, grid: Grid) -> Outcome:
    """Train a task over a grid."""
    task = run.build()
    plan = Plan(task, run.chain, run.federation, run.seed)
    plan.check()
    trained = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    buffers = dict(task.model.named_buffers())
    evaluator = Evaluator(task)

    def apart(arrays: Tensors) -> tuple[Tensors, Tensors]:
        return {name: arrays[name] for name in trained}, {name: arrays[name] for name in buffers}

    def evaluate(_: int, arrays: Tensors) -> dict[str, float]:
        utility = evaluator.utility(*apart(arrays))
        parts = {"test": utility.test, "validation": utility.validation, "train": utility.train}
        return {f"{part} {utility.metric}": value for part, value in parts.items() if value is not None}

    def recalibrated(arrays: Tensors) -> Tensors:
        return {**arrays, **evaluator.recalibrated(*apart(arrays))}

    server = Server(
        run.server(),
        folder=run.out,
        defense=run.chain,
        local=run.local(),
        facts=plan.facts(1),
        buffer_names=tuple(buffers),
        share_buffers=task.buffers == "shared",
        seeded=run.noise == "seeded",
    )
    outcome = server.start(
        grid,
        {**trained, **buffers},
        evaluate=evaluate,
        finish=recalibrated if task.buffers == "recalibrated" else None,
    )
    _save(run, task, outcome)
    return outcome


def _save(run: TaskRun, task: Task, outcome: Outcome) -> None:
    write_safetensors(run.out / "model.safetensors", {**task.model.state_dict(), **outcome.arrays})
    promised = outcome.ledger.statement()
    told: dict[str, Any] = {
        "rounds": len(outcome.history),
        "evaluation": outcome.history[-1].evaluation,
        "guarantee": {name: _finite(getattr(promised, name)) for name in ("sentence", "formal", "epsilon", "delta")},
    }
    write_atomically(run.out / OUTCOME, json.dumps(told, indent=1).encode())


def _finite(value: Any) -> Any:
    """JSON has no infinity; the sentence says it."""
    return None if isinstance(value, float) and math.isinf(value) else value
