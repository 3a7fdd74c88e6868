"""The first stage: a federation trained under a chain of defenses, or under none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil.auditing.keys import training_key
from fedveil.auditing.store import Entry, Wanted
from fedveil.auditing.workshop import Workshop, unrecorded
from fedveil.clients.engine import Tensors
from fedveil.federation.history import RoundRecord, Utility
from fedveil.federation.run import Run, train
from fedveil.federation.steps import Prepared
from fedveil.tensorfile import grouped, prefixed


@dataclass(frozen=True, eq=False)
class Trained:
    """What a federation came to, as far as audits need it."""

    key: str
    run: Run  # without what was captured
    starts: dict[int, tuple[Tensors, Tensors]]  # round -> weights and buffers at its start, of the recorded rounds


def trained(shop: Workshop, prepared: Prepared, line: str, rounds: tuple[int, ...] = ()) -> Trained:
    """A run under the chain of a prepared one, from the store if it was trained before.

    rounds: whose start is to be known. Which they are changes nothing else: they are not in the key.
    """
    plan, key = unrecorded(prepared.plan), run_key(shop, prepared)
    settings = plan.settings
    recorded = replace(prepared, plan=replace(plan, settings=replace(settings, record_rounds=rounds, record_clients=1)))
    shop.tell(line)

    def make(folder: Path | None) -> Trained:
        place = None if folder is None else folder / f"rounds-{'-'.join(map(str, rounds)) or 'none'}"
        made = train(recorded, folder=place, resume=place is not None, observers=shop.watch.observers)
        return _trained(key, made)

    about = f"{shop.case.name}, {settings.rounds} rounds under {plan.chain}"
    return shop.store.keep("train", Wanted(key, about), _Form(key, rounds), make)


def run_key(shop: Workshop, prepared: Prepared) -> str:
    """The key of what a run of a workshop comes to, with the defense or without."""
    chain, engine = prepared.plan.chain, prepared.engine
    told = shop.told | {"defense": str(chain)}
    return training_key(told, chain, [engine.backend, engine.chunk, str(prepared.device)])


def _trained(key: str, run: Run) -> Trained:
    starts = {}
    for each in run.captured:
        capture = each.capture
        starts[each.round] = (dict(capture.before), dict(capture.buffers_before or {}))
    return Trained(key, replace(run, captured=[]), starts)


@dataclass(frozen=True)
class _Form:
    """A run as an entry of the store. One that did not record the rounds that are asked for now is no use."""

    key: str
    rounds: tuple[int, ...]

    def to_entry(self, result: Trained, folder: Path) -> Entry:
        """Weights, buffers, the starts of rounds, and the history."""
        run = result.run
        tensors: dict[str, Tensor] = prefixed("params", run.params) | prefixed("buffers", run.buffers)
        if run.values is not None:
            tensors["values"] = run.values
        for number, (params, buffers) in result.starts.items():
            tensors |= prefixed(f"start {number} params", params) | prefixed(f"start {number} buffers", buffers)
        facts = {
            "untrained": run.untrained.model_dump(),
            "history": [record.model_dump() for record in run.history],
            "chosen_round": run.chosen_round,
            "utility": run.utility.model_dump(),
            "early_stopped": run.early_stopped,
            "backend": run.backend,
            "asked": self.rounds,
            "starts": list(result.starts),
        }
        return Entry(tensors, facts)

    def from_entry(self, entry: Entry) -> Trained:
        """The run again, if it has what is asked for."""
        facts: dict[str, Any] = entry.facts
        if not set(self.rounds) <= set(facts["asked"]):
            raise ValueError("other rounds were recorded")
        groups = grouped(entry.tensors)
        run = Run(
            params=groups["params"],
            buffers=groups.get("buffers", {}),
            untrained=Utility(**facts["untrained"]),
            history=[RoundRecord(**record) for record in facts["history"]],
            chosen_round=facts["chosen_round"],
            utility=Utility(**facts["utility"]),
            values=entry.tensors.get("values"),
            early_stopped=facts["early_stopped"],
            backend=facts["backend"],
        )
        starts = {
            number: (groups[f"start {number} params"], groups.get(f"start {number} buffers", {}))
            for number in facts["starts"]
        }
        return Trained(self.key, run, starts)


def train_both(shop: Workshop) -> tuple[Trained | None, Trained | None]:
    """The runs without the defense and with it, as far as they are asked for."""
    if not shop.experiment.trains:
        return None, None
    later = tuple(number for number in shop.experiment.audit.rounds if number > 1)
    chain = shop.experiment.chain
    if not chain.defenses:
        return trained(shop, shop.plain, "training", later), None
    bare = trained(shop, shop.plain, "training without a defense")
    return bare, trained(shop, shop.defended, f"training under {chain}", later)
