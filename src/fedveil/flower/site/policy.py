"""The policy file of a site."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import pydantic

from fedveil.auditing.experiment import read_toml
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure
from fedveil.errors import FedveilError
from fedveil.fields import Count, Positive, declared, field_names
from fedveil.flower.rules import NUM_EXAMPLES, RUNNING, Rules
from fedveil.intake import LONGEST
from fedveil.ledger.ledger import Ledger, Release

KINDS = ("train", "evaluate", "query")


@declared
class Policy:
    """What a site lets out. A policy file has these fields, and only `defense` is required.

    ```toml
    defense = "clip:norm=1,at=upload+gaussian-noise:sigma=0.01,at=upload"
    metrics = ["num-examples"]
    log = "/var/log/fedveil/left.jsonl"
    state = "/var/lib/fedveil"
    ```
    """

    defense: str  # every update goes through it, whatever the app did before
    of: Literal["weights", "delta", "gradient"] | None = None  # what it acts on: see `Rules`
    buffers: Literal["withhold", "share"] = "withhold"
    buffer_names: tuple[str, ...] = RUNNING
    metrics: tuple[str, ...] = (NUM_EXAMPLES,)  # single numbers that may go along, rounded
    messages: tuple[Literal["train", "evaluate", "query"], ...] = ("train", "query")  # kinds that are answered
    longest: Positive = LONGEST  # norm of a protected update
    updates: Count | None = None  # as many may leave in all
    epsilon: Positive | None = None  # no update leaves that would spend more than this in all
    delta: float = pydantic.Field(default=1e-5, gt=0, lt=1)
    apps: tuple[str, ...] = ()  # publisher/name of the apps that may run; none named: any
    log: Path  # a line of JSON for everything that left or was refused
    state: Path  # folder in which the site keeps what it has spent

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        try:
            rules = self.rules
        except FedveilError as error:
            raise ValueError(str(error)) from None
        if not rules.chain.defenses:
            raise ValueError("defense must protect something: a policy with 'none' would let everything out")
        late = [each for each in rules.chain.defenses if each in rules.early or "batch" in each.needs]
        if late or rules.chain.aggregates:
            name = (late or rules.chain.defenses)[0].name
            raise ValueError(
                f"{name} must act in training or on the server, where a site cannot enforce it: use a defense of the "
                "upload, or one with at=upload"
            )
        try:
            rules.chain.check_message(rules.kind)
        except FedveilError as error:
            raise ValueError(str(error)) from None
        if self.epsilon is not None and not _counted(rules.chain):
            raise ValueError(f"epsilon limits what one formal guarantee spends, and {rules.chain} has none, or several")
        if self.epsilon is not None and self.buffers == "share":
            raise ValueError(
                "epsilon covers no buffers that leave undefended: let buffers be 'withhold', or leave it out"
            )
        return self

    @cached_property
    def rules(self) -> Rules:
        """What may leave, and how it is protected."""
        return Rules(
            chain=Chain.of(self.defense),
            of=self.of,
            buffers=self.buffers,
            buffer_names=self.buffer_names,
            metrics=self.metrics,
            longest=self.longest,
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a policy file. Paths in it are seen from its folder."""
        told = read_toml(path)
        unknown = sorted(told.keys() - set(field_names(cls)))
        if unknown:
            raise FedveilError(f"{path}: a policy has no field '{unknown[0]}' (fields: {', '.join(field_names(cls))})")
        told = {"log": "left.jsonl", "state": "state", **told}
        for name in ("log", "state"):
            told[name] = (path.absolute().parent / str(told[name])).resolve()
        try:
            return cls(**told)
        except FedveilError as error:
            raise FedveilError(f"{path}: {str(error).removeprefix('Policy: ')}") from None

    def refuse(self, run_config: Mapping[str, Any], app: str = "") -> str | None:
        """Why a run may not use this site; None where it may.

        A run that names no defense, or others beside ours, may: ours acts in any case. One that asks for less than the
        policy counts on something that will not come, and is refused.
        """
        if self.apps and app not in self.apps:
            return f"the site's policy does not allow the app {app!r:.80}"
        if self.buffers == "withhold" and run_config.get("protect-buffers") == "share":
            return "the run asks for the buffers, which the site's policy withholds"
        wanted = {name.strip() for name in str(run_config.get("protect-metrics", "")).split(",")} - {""}
        if not wanted <= set(self.metrics):
            return "the run asks for metrics that the site's policy does not let out"
        told = run_config.get("defense")
        if told is None:
            return None
        try:
            asked = Chain.of(str(told))
        except FedveilError:
            return "the run names a defense that this site does not know"
        if not asked.defenses:
            return f"the run asks for no defense, and the site's policy is {self.rules.chain}"
        for own in self.rules.chain.defenses:
            for other in asked.defenses:
                if type(own) is type(other) and _weaker(other, own):
                    return f"the run asks for a weaker {own.name} than the site's policy, {self.rules.chain}"
        return None


def _weaker(one: Defense, other: Defense) -> bool:
    """Whether a defense protects less than another of its kind, by the field that says how strongly it acts."""
    strength = type(one).strength
    if strength is None:
        return False
    mine, theirs = float(getattr(one, strength.field)), float(getattr(other, strength.field))
    return mine < theirs if strength.stronger == "up" else mine > theirs


def _counted(chain: Chain) -> bool:
    """Whether a ledger can say what updates under a chain spend together."""
    ledger = Ledger(Exposure(parameters=1, rounds=0, steps_per_round=1, sampling_rate=1.0, seeded=False))
    ledger.spend(0, Release(chain))
    return ledger.statement().epsilon is not None
