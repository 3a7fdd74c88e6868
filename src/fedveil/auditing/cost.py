"""What a defense cost: utility, time and bytes beside the undefended run of the same seeds."""

from __future__ import annotations

import statistics
from typing import Literal

import numpy as np

from fedveil.auditing.result import Cost, Estimate, RoundUtility
from fedveil.auditing.scoring import estimate
from fedveil.federation.history import Utility
from fedveil.federation.run import Run
from fedveil.leakage.intervals import bootstrap, expanded_tail, paired
from fedveil.tasks.task import Task

FEWEST_TIMES = 4  # timed rounds of each run, below which their spread says nothing


def measure_cost(task: Task, undefended: Run | None, defended: Run | None) -> Cost:
    """The cost of the defense; without a defended run, the utility of the undefended one alone."""
    if undefended is None:
        return Cost()
    runs: dict[Literal["defended", "undefended"], Run] = {"undefended": undefended}
    if defended is not None:
        runs["defended"] = defended
    seconds = {name: _seconds(run) for name, run in runs.items()}
    difference = None
    if defended is not None and defended.correct is not None and undefended.correct is not None:
        difference = estimate(paired(defended.correct.numpy(), undefended.correct.numpy(), share=True))
    last = (defended or undefended).history[-1]
    return Cost(
        rounds=len((defended or undefended).history),
        defended=_accuracy(defended),
        undefended=_accuracy(undefended),
        difference=difference,
        beside=_beside(runs),
        history=_history(undefended, defended),
        seconds_per_round=seconds,
        slowdown=seconds["defended"] / seconds["undefended"] if defended is not None else None,
        slowdown_interval=_slowdown(undefended, defended) if defended is not None else None,
        bytes_per_round={"up": last.bytes_up, "down": last.bytes_down},
        chance=1 / task.classes if task.classes else None,
        majority=_majority(task) if task.classes else None,
    )


def _majority(task: Task) -> float | None:
    """The share of the most frequent class among the test examples."""
    labels = task.test.labels
    return float(labels.bincount().max()) / len(labels) if len(labels) else None


def _accuracy(run: Run | None) -> Estimate | None:
    if run is None or run.correct is None:
        return None
    return estimate(bootstrap(run.correct.numpy(), share=True))


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
    found = [RoundUtility(round=r, defended=_value(ours), undefended=_value(bare)) for r, ours, bare in rounds]
    return [each for each in found if each.defended is not None or each.undefended is not None]


def _at(run: Run | None, number: int) -> Utility | None:
    return run.history[number].utility if run is not None and number < len(run.history) else None


def _value(utility: Utility | None) -> float | None:
    if utility is None:
        return None
    return utility.test if utility.test is not None else utility.validation
