"""Kill runs at all kinds of points, resume them, and check the results."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kill.compare import differences, rounds
from kill.scenarios import Scenario
from kill.traces import shared_memory, traces

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STAGES = ("start-up", "training", "attacking", "saving", "report")
MOST = 5  # kills of one run in a row
KEPT = ("out", "store")  # what must be the same in the end


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run."""

    folder: Path
    seconds: float
    changes: int  # made to its folder
    rounds: int


@dataclass
class Tally:
    """The results of the runs of one scenario."""

    runs: int = 0
    stages: Counter[str] = field(default_factory=Counter)  # the kills by stage
    faults: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Kills of runs that had not ended yet."""
        return self.stages.total()


class Ended(Exception):
    """A run did something wrong; the message says what."""


class Campaign:
    """Runs of several scenarios in one folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._wholes: dict[Scenario, Whole] = {}

    def whole(self, scenario: Scenario) -> Whole:
        """The uninterrupted run of a scenario, made once."""
        if scenario not in self._wholes:
            place = self._folder / scenario.name / "whole"
            run = Attempt(scenario, place)
            try:
                code, out, err = run.end()
            except Ended as error:
                raise RuntimeError(f"{scenario.name}, uninterrupted: {error}") from None
            if code != 0:
                raise RuntimeError(f"{scenario.name} fails even without a kill: {err.strip()}")
            changes = int(out.rpartition("changes: ")[2])
            self._wholes[scenario] = Whole(place, run.seconds, changes, rounds(place))
        return self._wholes[scenario]

    def run(self, scenario: Scenario, number: int, kills: int, tally: Tally) -> None:
        """Start a run, kill it up to `kills` times, resume it until it is done, and compare."""
        whole = self.whole(scenario)
        draws = random.Random(f"{self._seed} {number}")
        place = self._folder / scenario.name / str(number)
        tally.runs += 1
        saved = 0
        try:
            for _ in range(kills):
                attempt = self._killed(scenario, place, whole, draws)
                if attempt is None:
                    break  # it ended before the kill
                tally.stages[stage(place, whole)] += 1
                if rounds(place) < saved:
                    raise Ended(f"{saved} rounds were kept, now there are {rounds(place)}")
                saved = rounds(place)
            last = Attempt(scenario, place)
            code, _, err = last.end()
            if code != 0:
                raise Ended(f"it cannot be resumed: code {code}, {err.strip()}")
            different = [each for part in KEPT for each in differences(place / part, whole.folder / part)]
            if different:
                raise Ended(f"it differs from an uninterrupted run: {', '.join(different)}")
        except Ended as error:
            tally.faults.append(f"{scenario.name}, run {number}: {error} ({place})")
            return
        shutil.rmtree(place)

    def _killed(self, scenario: Scenario, place: Path, whole: Whole, draws: random.Random) -> Attempt | None:
        """An attempt that was killed, or None if it ended before."""
        number = draws.choice(SIGNALS)
        if draws.random() < 0.5:
            attempt = Attempt(scenario, place, number, draws.randint(1, whole.changes))
        else:
            attempt = Attempt(scenario, place, number, -1)
            attempt.kill_after(draws.uniform(0, whole.seconds))
        code, _, err = attempt.end()
        if code == 0:
            return None
        if code not in (-number, 128 + number) or (code > 0 and not err.startswith("fedveil: stopped")):
            raise Ended(f"after {number.name} it ends with {code} and says: {err.strip()}")
        return attempt


class Attempt:
    """One process of a run, with a folder of its own for temporary files."""

    def __init__(
        self, scenario: Scenario, place: Path, number: signal.Signals = signal.SIGKILL, change: int = 0
    ) -> None:
        self.out = place / "out"
        self._number = number
        self._temporary = place / "temporary"
        self._temporary.mkdir(parents=True, exist_ok=True)
        self._shared = shared_memory()
        self._began = time.monotonic()
        self.seconds = 0.0
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), "PYTHONPATH": path}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(place.parent / "torch")  # torch always makes this folder
        program = (sys.executable, "-m", "kill.program", str(int(number)), str(change), ".")
        self._process = subprocess.Popen(
            [
                *program,
                *scenario.arguments,
                *(("--store", "store") if scenario.arguments[0] == "audit" else ()),
                "--out",
                "out",
                "--resume",
            ],
            cwd=place,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # makes its processes a group, so that those left behind can be found
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
        )

    def kill_after(self, seconds: float) -> None:
        """Send the signal after this time, unless the process has ended before."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.send_signal(self._number)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, output and errors. Looks for what was left outside of the folder."""
        out, err = self._process.communicate()
        self.seconds = time.monotonic() - self._began
        left = traces(self._process.pid, self._temporary, self._shared)
        if left:
            raise Ended(f"it left {', '.join(left)}")
        return self._process.returncode, out, err


def stage(place: Path, whole: Whole) -> str:
    """The stage that a run has reached, judging by its files."""
    out = place / "out"
    there = {path.name for path in out.iterdir()} if out.exists() else set()
    if "config.toml" not in there:
        return "start-up"
    if there & {"result.json", "history.json"}:
        return "report"
    if "images.safetensors" in there or "model.safetensors" in there:
        return "saving"
    return "training" if rounds(place) < whole.rounds else "attacking"


def campaign(
    scenarios: Sequence[Scenario],
    kills: int,
    seed: int,
    folder: Path,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Tally]:
    """Kill runs of all scenarios in turn, `kills` times in all. Folders of runs with faults are kept."""
    tallies = {scenario.name: Tally() for scenario in scenarios}
    runs = Campaign(folder, seed)
    number = 0
    while (left := kills - sum(tally.kills for tally in tallies.values())) > 0:
        scenario = scenarios[number % len(scenarios)]
        tally = tallies[scenario.name]
        known = len(tally.faults)
        runs.run(scenario, number, min(left, 2 + number % (MOST - 1)), tally)
        for fault in tally.faults[known:]:
            tell(fault)
        number += 1
        tell(f"{kills - left} of {kills} kills") if number % 10 == 0 else None
        if sum(len(each.faults) for each in tallies.values()) > kills:
            break  # nothing works, and no kill would ever be counted
    return tallies
