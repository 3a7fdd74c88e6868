"""What a defense cost: utility, time and bytes beside the undefended run of the same seeds."""

from __future__ import annotations

import statistics
from typing import Literal

from fedveil.auditing.result import Cost, Estimate, RoundUtility
from fedveil.auditing.scoring import estimate
from fedveil.federation.history import Utility
from fedveil.federation.run import Run
from fedveil.leakage.intervals import bootstrap, paired


def measure_cost(undefended: Run | None, defended: Run | None) -> Cost:
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
        bytes_per_round={"up": last.bytes_up, "down": last.bytes_down},
    )


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
    """The median round; the first pays for set-up and is left out where there are others."""
    return statistics.median([record.seconds for record in (run.history[1:] or run.history)])


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
