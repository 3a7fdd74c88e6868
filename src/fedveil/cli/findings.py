"""What the command line prints of a result: sentences and a table for people, one object for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.auditing.audit_result import AuditResult

THRESHOLDS = ("exposed_above", "smallest_gain", "rule_out", "recognizable_from", "large_drop")


def print_findings(outcome: AuditResult, report: Path) -> None:
    """The table, the verdict with all that must be said beside it, and what to do next."""
    verdict = outcome.result.verdict
    print(outcome.leakage)
    if any(row.strongest for row in outcome.result.rows):
        print("* the strongest attacker")
    print()
    print("\n".join(verdict.sentences))
    for warning in sorted(verdict.warnings, key=lambda each: not each.loud):
        print(f"{'WARNING' if warning.loud else 'Note'}: {warning.words}")
    print(f"\nThe report is {report}\nResult: {verdict.status}. {verdict.why}")
    if verdict.next_step:
        print(f"Next: {verdict.next_step}" + (f"\n  {verdict.command}" if verdict.command else ""))


def summary(outcome: AuditResult) -> dict[str, Any]:
    """All settings and numbers, but for the values behind them."""
    result = outcome.result
    used, verdict = result.provenance.config, result.verdict
    settings = used.get("audit", {})
    return {
        "version": result.provenance.versions.get("fedveil"),
        "data": result.data,
        "model": result.model,
        "task": used.get("task", {}),
        "protocol": result.protocol,
        "seed": result.provenance.seed,
        "defense": used.get("defense", []),
        "suite": result.suite or None,
        "attack": used.get("attack") or [run.settings for run in result.attacks],
        "auxiliary": None if result.auxiliary is None else result.auxiliary.model_dump(),
        "not_tried": result.not_tried,
        "federation": used.get("federation", {}),
        "attacked_rounds": settings.get("rounds"),
        "thresholds": {name: settings.get(name) for name in THRESHOLDS},
        "guarantee": result.defense.guarantee,
        "status": verdict.status,
        "answers": [answer.model_dump() for answer in verdict.answers],
        "sentences": verdict.sentences,
        "why": verdict.why,
        "warnings": [warning.words for warning in verdict.warnings],
        "next_step": verdict.next_step,
        "next_command": verdict.command,
        "rows": [row.model_dump(exclude={"values"}) for row in result.rows],
        "candidates": result.candidates,
        "cost": result.cost.model_dump(exclude={"history"}),
        "seconds": result.provenance.seconds,
    }


def print_json(told: Mapping[str, Any]) -> None:
    """One object and nothing else."""
    print(json.dumps(told, indent=1, ensure_ascii=False))
