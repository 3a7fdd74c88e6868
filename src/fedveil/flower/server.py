"""`Server`: the rounds of a federation over Flower. It goes on without clients that vanish, fail or send nonsense."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.clients.sgd import at_rest, sgd_step
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure, exposure_of
from fedveil.errors import FedveilError, one_line
from fedveil.federation.capture import MOST_STEPS, Capture
from fedveil.federation.schedule import sampled_clients
from fedveil.fields import field_values
from fedveil.flower.exchange import Exchange
from fedveil.flower.keeping import Keeper, Progress, RoundLine
from fedveil.flower.records import to_record, to_tensors
from fedveil.flower.roster import Roster, missing
from fedveil.flower.rules import RUNNING, Rules
from fedveil.flower.settings import LocalSteps, ServerSettings
from fedveil.flower.taking import Taken, strategy_of, take, together
from fedveil.flower.tracking import trackers
from fedveil.ledger.ledger import Ledger, Release
from fedveil.ownership import owned

log = logging.getLogger(__name__)
Evaluate = Callable[[int, Tensors], Mapping[str, float]]
Finish = Callable[[Tensors], Tensors]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The model that a run came to, and its rounds."""

    arrays: Tensors
    history: list[RoundLine]
    ledger: Ledger


class Server:
    """Runs the rounds of a Flower `ServerApp`.

    ```python
    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server = fedveil.flower.Server(ServerSettings(rounds=10), folder="out", defense="spm:epsilon=1")
        server.start(grid, model.state_dict())
    ```

    - folder: keeps a checkpoint after every round, the ledger, `rounds.jsonl` and captures. A server that is started
      again with the same folder goes on after the last whole round.
    - defense: what clients protect their updates with; for the ledger and captures.
    - local: what is public of the clients' training, for the same two.
    - facts: further public settings for captures, by the names in `fedveil.federation.capture`.
    - strategy: one of Flower's or your own, in place of `settings.aggregation`; only its `aggregate_train` is used.
    - buffer_names: patterns of the arrays that are not weights; `share_buffers` tells that clients send theirs.
    - seeded: the clients' noise is drawn from a seed, as in a simulation: the ledger says so.
    """

    def __init__(
        self,
        settings: ServerSettings | None = None,
        *,
        folder: Path | str | None = None,
        defense: Defense | Chain | str | None = None,
        local: LocalSteps | None = None,
        facts: Mapping[str, Any] | None = None,
        strategy: Strategy | None = None,
        buffer_names: tuple[str, ...] = RUNNING,
        share_buffers: bool = False,
        seeded: bool = False,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.folder = None if folder is None else Path(folder)
        self.chain = Chain.of(defense)
        self._local, self._facts = local, dict(facts or {})
        self._strategy = strategy or strategy_of(self.settings)
        self._rules = Rules(buffer_names=buffer_names, buffers="share" if share_buffers else "withhold")
        self._seeded = seeded
        if self.settings.record_rounds and (local is None or self.folder is None):
            raise FedveilError("captures need local=, what is public of the clients' training, and a folder")
        # A guarantee that holds for each local step is worth nothing where nobody knows how many there were.
        self._counts_steps = self.settings.kind != "gradient" and any(map(_of_each_step, self.chain.defenses))
        if self._counts_steps and local is None:
            raise FedveilError(
                f"{self.chain} acts on every local step: give local=, the public settings of the clients' training, "
                "or the ledger counts too few"
            )
        self._track = trackers(self.settings.track, self.folder)

    def start(
        self,
        grid: Grid,
        initial: Mapping[str, Tensor] | ArrayRecord,
        *,
        evaluate: Evaluate | None = None,
        finish: Finish | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """All rounds that are left.

        evaluate: given the round and the arrays, the server's own measures of the model.
        finish: given the arrays after a round, those that the server goes on with.
        config: goes to the clients with every message, beside "server-round".
        """
        with owned(self.folder):  # two runs in one folder would take each other's checkpoints for their own
            return self._run(grid, initial, evaluate, finish, config or {})

    def _run(
        self,
        grid: Grid,
        initial: Mapping[str, Tensor] | ArrayRecord,
        evaluate: Evaluate | None,
        finish: Finish | None,
        config: Mapping[str, Any],
    ) -> Outcome:
        first = to_tensors(initial) if isinstance(initial, ArrayRecord) else _copied(initial)
        weights = {name: t for name, t in first.items() if not self._rules.is_buffer(name)}
        statistics = [t for name, t in first.items() if name not in weights and t.is_floating_point()]
        shares = self._rules.buffers == "share" and bool(statistics)
        ledger = Ledger(exposure_of(weights, seeded=self._seeded, bare_buffers=shares))
        keeper = Keeper(self.folder, self._configuration())
        progress = keeper.load(ledger, self.chain)
        if progress is None:
            progress = Progress(first, at_rest(weights, self.settings.momentum) if self._steps else {})
            keeper.start()
        rounds = _Rounds(self, Exchange(grid), keeper, progress, ledger)
        while len(progress.history) < self.settings.rounds:
            rounds.next(evaluate, finish, config)
        return Outcome(progress.arrays, progress.history, ledger)

    @property
    def _steps(self) -> bool:
        return self.settings.kind == "gradient"

    def _configuration(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that stopped."""
        open_ended = ("rounds", "wait", "limit", "record_rounds", "record_clients", "track", "evaluate_every")
        told = {name: value for name, value in field_values(self.settings).items() if name not in open_ended}
        local = None if self._local is None else field_values(self._local)
        return {"settings": told, "defense": str(self.chain), "local": local, "strategy": type(self._strategy).__name__}


class _Rounds:
    """A run on its way."""

    def __init__(self, server: Server, exchange: Exchange, keeper: Keeper, progress: Progress, ledger: Ledger) -> None:
        self._server, self._settings = server, server.settings
        self._exchange, self._roster = exchange, Roster(exchange)
        self._keeper, self._progress, self._ledger = keeper, progress, ledger
        self._members = None if server.settings.clients is None else list(range(server.settings.clients))
        # What clients told last: the ledger needs it for those who tell nothing in a round.
        self._examples = {client: many for line in progress.history for client, many in line.examples.items()}

    def next(self, evaluate: Evaluate | None, finish: Finish | None, config: Mapping[str, Any]) -> None:
        """One round."""
        settings, number = self._settings, len(self._progress.history) + 1
        there = self._roster.wait(settings.minimum, settings.wait)
        if self._members is None:
            self._members = sorted(there)
        drawn = sampled_clients(settings.seed, len(self._members), settings.sampling_rate, number)
        asked = [self._members[place] for place in drawn]
        began = time.monotonic()
        lost = missing(asked, there)
        busy = self._exchange.busy()
        lost |= {client: "still busy with an earlier round" for client in asked if client in busy and client in there}
        reached = [client for client in asked if client not in lost]
        self._count_ahead(reached)
        content = RecordDict(
            {
                "arrays": to_record(self._progress.arrays),
                "config": ConfigRecord({**config, "server-round": number}),
            }
        )
        done = self._exchange.run(
            {
                client: Message(
                    content,
                    dst_node_id=there[client],
                    message_type=MessageType.TRAIN,
                    ttl=2 * settings.limit,
                    group_id=str(number),
                )
                for client in reached
            },
            settings.limit,
        )
        server = self._server
        taken = take(done.replies, self._progress.arrays, settings, server._rules, server._counts_steps)
        lost |= done.lost
        self._examples |= taken.examples
        self._capture(taken, number)
        changed = len(taken.updates) >= settings.minimum
        if changed:
            self._move(together(taken, number, settings, server._strategy))
            if finish is not None:
                self._progress.arrays = finish(self._progress.arrays)
        self._count(taken, list(done.lost))
        told: dict[str, float] = {}
        if evaluate is not None and (number % settings.evaluate_every == 0 or number == settings.rounds):
            measured = evaluate(number, self._progress.arrays)
            told = {name: float(value) for name, value in measured.items() if math.isfinite(value)}
        line = RoundLine(
            round=number,
            asked=asked,
            taken=sorted(taken.updates),
            refused=taken.refused,
            failed=taken.failed,
            lost=dict(sorted(lost.items())),
            changed=changed,
            seconds=time.monotonic() - began,
            bytes_up=taken.bytes_up,
            examples=taken.examples,
            metrics=_means(taken),
            evaluation=told,
        )
        self._progress.history.append(line)
        self._keeper.save(self._progress)
        self._tell(line)

    def _tell(self, line: RoundLine) -> None:
        for words, clients in (("refused", line.refused), ("without an update", line.failed), ("lost", line.lost)):
            for client, why in clients.items():
                log.warning("round %d: client %d %s: %s", line.round, client, words, why)
        if line.lost and not (line.taken or line.refused or line.failed):
            log.warning(
                "round %d: nobody replied: is limit, %g s, longer than a client trains?",
                line.round,
                self._settings.limit,
            )
        if not line.changed:
            log.warning(
                "round %d: %d updates, and %d are needed: the model stays as it is",
                line.round,
                len(line.taken),
                self._settings.minimum,
            )
        numbers = {**line.metrics, **line.evaluation, "taken": len(line.taken), "seconds": line.seconds}
        for track in self._server._track:
            try:
                track(line.round, numbers)
            except Exception as error:  # a tracker out of reach must not end a run; rounds.jsonl has it all
                log.warning("round %d: its results could not be tracked: %s", line.round, one_line(error, typed=True))

    def _move(self, mean: Tensors) -> None:
        """The model after what the clients sent together."""
        progress, settings = self._progress, self._settings
        if not self._server._steps:
            progress.arrays = {name: mean[name] for name in progress.arrays}
            return
        weights = {name: t for name, t in progress.arrays.items() if not self._server._rules.is_buffer(name)}
        moved, progress.velocity = sgd_step(
            weights,
            {name: mean[name] for name in weights},
            progress.velocity,
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        progress.arrays = {**progress.arrays, **{name: mean[name] for name in mean if name not in weights}, **moved}

    # ---- what was spent --------------------------------------------------------------------------------

    def _release(self, client: int) -> Release:
        """One message of a client. Of one that never told its examples, as many steps as of whoever has the most."""
        local, kind = self._server._local, self._settings.kind
        most = max(self._examples.values(), default=None)
        examples = self._examples.get(client, most)
        if local is None or examples is None:
            return Release(self._server.chain)
        rate = min(1.0, local.batch_size / examples) if client in self._examples else 1.0
        return Release(self._server.chain, gradients=local.steps(examples, kind), example_rate=rate)

    def _count_ahead(self, clients: list[int]) -> None:
        """Keep a ledger in which all that are asked have sent: the server may die before it knows who did."""
        ahead = copy.deepcopy(self._ledger)
        for client in clients:
            ahead.spend(client, self._release(client))
        self._keeper.save_ledger(ahead)

    def _count(self, taken: Taken, unheard: list[int]) -> None:
        """Those whose update came, taken or not, and those of whom nothing was heard, for they may have sent one."""
        for client in (*taken.updates, *taken.refused, *unheard):
            self._ledger.spend(client, self._release(client))
        self._keeper.save_ledger(self._ledger)

    # ---- captures --------------------------------------------------------------------------------------

    def _capture(self, taken: Taken, number: int) -> None:
        settings, local, folder = self._settings, self._server._local, self._server.folder
        if number not in settings.record_rounds or local is None or folder is None:
            return
        place = folder / "captures"
        place.mkdir(exist_ok=True)
        for client, update in list(taken.updates.items())[: settings.record_clients]:
            try:
                seen = self._seen(client, update, taken.examples.get(client), number, local)
                seen.save(place / f"round-{number:04}-client-{client:04}.safetensors")
            except FedveilError as error:  # what a client says of itself must not end the run
                log.warning("round %d: the update of client %d was not captured: %s", number, client, error)

    def _seen(self, client: int, update: Tensors, examples: int | None, number: int, local: LocalSteps) -> Capture:
        """One client's update as an attacker on the server has it."""
        settings, rules, before = self._settings, self._server._rules, self._progress.arrays
        if examples is None or local.steps(examples, settings.kind) > MOST_STEPS:
            raise FedveilError("it tells no num-examples that could be right")
        sizes = local.sizes(examples, settings.kind)
        gradient = settings.kind == "gradient"
        return Capture(
            kind=settings.kind,
            before={name: t for name, t in before.items() if not rules.is_buffer(name)},
            shared={
                name: t - before[name] if settings.kind == "delta" else t
                for name, t in update.items()
                if not rules.is_buffer(name)
            },
            buffers={name: t for name, t in update.items() if rules.is_buffer(name)},
            buffers_before={name: t for name, t in before.items() if rules.is_buffer(name) and name in update},
            client=client,
            round=number,
            steps=len(sizes),
            lr=(settings.lr if gradient else local.lr,) * len(sizes),
            momentum=0.0 if gradient else local.momentum,
            batch_sizes=sizes,
            facts={
                "defense": str(self._server.chain),
                "local_epochs": 1 if gradient else local.local_epochs,
                "weight_decay": local.weight_decay,
                **self._server._facts,
            },
        )


def _of_each_step(defense: Defense) -> bool:
    """Whether a formal guarantee of it is spent by every local step."""
    once = Exposure(parameters=1, rounds=1, steps_per_round=1, sampling_rate=1.0)
    return defense.acts_at in ("sample", "data", "gradient") and defense.guarantee(once).formal


def _copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _means(taken: Taken) -> dict[str, float]:
    """The clients' metrics in the mean, weighted by their examples."""
    found: dict[str, list[tuple[float, int]]] = {}
    for client, metrics in taken.metrics.items():
        for name, value in metrics.items():
            found.setdefault(name, []).append((value, taken.examples.get(client, 1)))
    return {name: sum(v * n for v, n in told) / sum(n for _, n in told) for name, told in found.items()}
