"""What a defense cost: utility, time and bytes beside the undefended run of the same seeds."""

from __future__ import annotations

import statistics
from typing import Literal

import numpy as np
import torch

from fedveil.auditing.result import Cost, Estimate, RoundUtility
from fedveil.auditing.scoring import estimate
from fedveil.federation.history import Utility
from fedveil.federation.run import Run
from fedveil.leakage.intervals import bootstrap, expanded_tail, paired
from fedveil.tasks.measures import Measure, measure
from fedveil.tasks.regression import variance
from fedveil.tasks.task import Task
from fedveil.tasks.tokens import by_frequency

ENDS = ("mean", "low", "high")
FEWEST_TIMES = 4  # timed rounds of each run, below which their spread says nothing


def measure_cost(task: Task, undefended: Run | None, defended: Run | None) -> Cost:
    """The cost of the defense; without a defended run, the utility of the undefended one alone."""
    if undefended is None:
        return Cost()
    runs: dict[Literal["defended", "undefended"], Run] = {"undefended": undefended}
    if defended is not None:
        runs["defended"] = defended
    seconds, kind = {name: _seconds(run) for name, run in runs.items()}, measure(undefended.utility.metric)
    difference = None
    if defended is not None and defended.values is not None and undefended.values is not None:
        share = defended.values.dtype == torch.bool
        found = paired(defended.values.numpy(), undefended.values.numpy(), share=share)
        difference = _change(estimate(found), undefended, kind)
    last = (defended or undefended).history[-1]
    return Cost(
        metric=undefended.utility.metric,
        rounds=len((defended or undefended).history),
        defended=_utility(defended, kind),
        undefended=_utility(undefended, kind),
        difference=difference,
        others=_others(runs),
        beside=_beside(runs),
        history=_history(undefended, defended),
        seconds_per_round=seconds,
        slowdown=seconds["defended"] / seconds["undefended"] if defended is not None else None,
        slowdown_interval=_slowdown(undefended, defended) if defended is not None else None,
        bytes_per_round={"up": last.bytes_up, "down": last.bytes_down},
        chance=1 / task.classes if task.classes else None,
        majority=_blind(task),
    )


def _majority(task: Task) -> float:
    """The share of the most frequent class among the test examples."""
    labels = task.test.labels
    return float(labels.bincount().max()) / len(labels)


def _utility(run: Run | None, kind: Measure) -> Estimate | None:
    if run is None or run.values is None:
        return None
    found = estimate(bootstrap(run.values.numpy(), share=run.values.dtype == torch.bool))
    return found.model_copy(update={end: kind.of_mean(getattr(found, end)) for end in ENDS})


def _change(found: Estimate, undefended: Run, kind: Measure) -> Estimate:
    """The difference of a measure from that of the values it is made of.

    Of losses it is what the ratio of two perplexities adds to the undefended one, which is taken as it is.
    """
    if not kind.of_losses or undefended.values is None:
        return found
    bare = float(undefended.values.double().mean())
    return found.model_copy(update={end: kind.of_mean(bare + getattr(found, end)) - kind.of_mean(bare) for end in ENDS})


def _blind(task: Task) -> float | None:
    """What an answer that needs no model comes to, by the task's measure."""
    if not len(task.test):
        return None
    if task.target.kind == "numbers":
        return variance(task.test.labels)
    if task.target.kind == "labels":
        return 0.5
    if task.target.kind == "tokens":
        return by_frequency(task.test.labels)
    return _majority(task) if task.classes else None


def _others(
    runs: dict[Literal["defended", "undefended"], Run],
) -> dict[str, dict[Literal["defended", "undefended"], float]]:
    """Other measures of the federation's model, by their names."""
    return {name: {which: run.utility.others[name] for which, run in runs.items()} for name in _common(runs)}


def _common(runs: dict[Literal["defended", "undefended"], Run]) -> list[str]:
    first, *rest = runs.values()
    return [name for name in first.utility.others if all(name in run.utility.others for run in rest)]


def _beside(
    runs: dict[Literal["defended", "undefended"], Run],
) -> dict[str, dict[Literal["defended", "undefended"], float]]:
    """The utility of other models than the federation's, by what they are."""
    names = dict.fromkeys(name for run in runs.values() for name in run.utility.beside)
    return {n: {which: r.utility.beside[n] for which, r in runs.items() if n in r.utility.beside} for n in names}


def _seconds(run: Run) -> float:
    """The median round."""
    return statistics.median(_times(run))


def _times(run: Run) -> list[float]:
    """The seconds of the rounds; the first pays for set-up and is left out where there are others."""
    return [record.seconds for record in (run.history[1:] or run.history)]


def _slowdown(undefended: Run, defended: Run, resamples: int = 2000) -> Estimate | None:
    """The ratio of the median rounds, with the interval that the spread of the rounds gives it."""
    bare, ours = np.asarray(_times(undefended)), np.asarray(_times(defended))
    fewest = min(len(bare), len(ours))
    if fewest < FEWEST_TIMES:
        return None
    random = np.random.Generator(np.random.Philox(0))
    medians = [np.median(random.choice(each, (resamples, len(each))), axis=1) for each in (ours, bare)]
    tail = expanded_tail(0.95, fewest)
    low, high = np.quantile(medians[0] / medians[1], [tail, 1 - tail])
    ratio = float(np.median(ours) / np.median(bare))
    return Estimate(mean=ratio, low=min(float(low), ratio), high=max(float(high), ratio), count=fewest)


def _history(undefended: Run, defended: Run | None) -> list[RoundUtility]:
    """Test utility after every evaluated round, or validation utility where there is no test data."""
    start = defended.untrained if defended is not None else None
    rounds: list[tuple[int, Utility | None, Utility | None]] = [(0, start, undefended.untrained)]
    for number in range(max(len(undefended.history), len(defended.history) if defended else 0)):
        rounds.append((number + 1, _at(defended, number), _at(undefended, number)))
    found = [
        RoundUtility(
            round=number,
            defended=_value(ours),
            undefended=_value(bare),
            validation=_part("validation", ours, bare),
            train=_part("train", ours, bare),
        )
        for number, ours, bare in rounds
    ]
    return [each for each in found if each.defended is not None or each.undefended is not None]


def _at(run: Run | None, number: int) -> Utility | None:
    return run.history[number].utility if run is not None and number < len(run.history) else None


def _part(
    part: Literal["validation", "train"], defended: Utility | None, undefended: Utility | None
) -> dict[Literal["defended", "undefended"], float]:
    """The utility on another part of the data, as far as it was measured."""
    both: dict[Literal["defended", "undefended"], Utility | None] = {"defended": defended, "undefended": undefended}
    found = {which: getattr(utility, part) for which, utility in both.items() if utility is not None}
    return {which: value for which, value in found.items() if value is not None}


def _value(utility: Utility | None) -> float | None:
    if utility is None:
        return None
    return utility.test if utility.test is not None else utility.validation
