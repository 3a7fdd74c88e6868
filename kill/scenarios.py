"""The runs to kill: small tasks, so that a kill costs little more than the start of the program."""

from __future__ import annotations

from dataclasses import dataclass

_TASK = ("--data", "digits", "--model", "mlp:hidden=[16]", "--limit", "160", "--clients", "2", "--quiet")
_TRAINING = ("--rounds", "6", "--defense", "gradient-dropout", "--backend", "stacked")
_ATTACK = ("--attack", "inverting-gradients:steps=30", "--victims", "4", "--candidates", "10")
_JUDGED = ("--attack-rounds", "1,2", "--reference", "none")


@dataclass(frozen=True)
class Scenario:
    """One command line; `--out` and `--resume` are added."""

    name: str
    arguments: tuple[str, ...]


def _scenario(command: str, protocol: str, workers: int) -> Scenario:
    own = (*_ATTACK, *_JUDGED) if command == "audit" else ("--record-rounds", "2,5")
    options = ("--protocol", protocol, "--workers", str(workers))
    return Scenario(f"{command}, {protocol}, {workers} at work", (command, *_TASK, *_TRAINING, *own, *options))


SCENARIOS = (
    _scenario("audit", "fedavg", 2),
    _scenario("train", "fedsgd", 1),
    _scenario("audit", "fedsgd", 1),
    _scenario("train", "fedavg", 2),
    _scenario("audit", "fedsgd", 2),
    _scenario("train", "fedavg", 1),
    _scenario("audit", "fedavg", 1),
)
