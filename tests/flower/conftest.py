"""Flower makes messages only inside of a task: these tests are one."""

from __future__ import annotations

import pytest
from flwr.supercore.task_identity import TaskIdentity


def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(autouse=True)
def _in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_task(monkeypatch)
