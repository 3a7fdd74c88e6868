"""Canaries: does a mechanism keep its promise? A lower bound of ε, measured, beside the ε that the ledger proves.

A canary is one unit of the guarantee, placed where it counts most. For a guarantee of one example it is a gradient: a
single entry, larger than the clip, added to those of real examples where they are clipped. For a guarantee of all data
of a client it is the whole update of that client, one entry up or down. A fair coin decides whether an example is in,
or which way an update points. The auditor sees what is released and knows all else, as the guarantee allows: the real
data, the places of the canaries, but not the coins. `ledger.one_run` makes a bound of the guesses.

The defense runs as it does in training, by its own code: sampling, clipping, noise. What is not covered is how a
deployment calls it, and where its random numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.auditing.result import Document
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.clients.sgd import sgd_step
from fedveil.defenses.base import Defense, SummedStep
from fedveil.defenses.chain import Chain
from fedveil.defenses.clip import clipped
from fedveil.defenses.guarantee import Exposure, GaussianRelease
from fedveil.errors import FedveilError
from fedveil.ledger.one_run import guess_counts, least_epsilon
from fedveil.ledger.statement import statement
from fedveil.streams import Streams
from fedveil.tasks.inputs import map_inputs
from fedveil.tasks.randomness import generator
from fedveil.tasks.task import Task
from fedveil.tree import Tree

REAL = 32  # real examples, or clients, beside every block of canaries
TOO_LARGE = 10.0  # size of a canary in units of the clip: clipping is tried, too
AT_ONCE = 2**23  # numbers of canaries that are worked on together


class CanaryAudit(Document):
    """What canaries found."""

    format: Literal["fedveil-canary-1"] = "fedveil-canary-1"
    defense: str
    unit: str  # "one training example"
    data: str
    model: str
    rounds: int
    example_rate: float  # the chance that an example is in a step; 1 where the unit is a client
    canaries: int
    guesses: int  # that the bound rests on
    right: int
    epsilon: float  # at least, with `confidence`
    promised: float  # by the ledger, over the same releases
    delta: float
    confidence: float
    provable: float  # what so many canaries show at most, if every guess is right
    seed: int

    @property
    def broken(self) -> bool:
        """Whether more was measured than is promised."""
        return self.epsilon > self.promised

    @property
    def sentence(self) -> str:
        """The finding."""
        found = f"ε ≥ {self.epsilon:.2f} with {100 * self.confidence:g} % confidence"
        promise = f"promised ε = {self.promised:.2f} at δ = {self.delta:.2g} for {self.unit}"
        if self.broken:
            return f"BROKEN: {found}; {promise}. The guarantee does not hold as stated."
        return f"{found}; {promise}: holds as far as {self.canaries:,} canaries can tell."

    @property
    def notes(self) -> list[str]:
        """What the finding rests on, and how far it reaches."""
        told = [f"{self.right:,} of {self.guesses:,} guesses were right, for {self.canaries:,} canaries."]
        if self.provable < self.promised:
            told.append(
                f"So many canaries show ε ≥ {self.provable:.2f} at most, whatever the mechanism does: use more "
                "canaries, or settings that promise less ε."
            )
        return told


@dataclass(frozen=True)
class CanarySettings:
    """How canaries are placed."""

    canaries: int = 1000
    rounds: int = 1  # releases of each client, or steps
    batch_size: int | None = None  # of DP-SGD, on average; None: every example in every step
    delta: float = 1e-6  # at which ε is bounded and promised; a small one is best: m·δ counts
    confidence: float = 0.95
    lr: float = 0.1

    def check(self) -> None:
        """Refuse what no bound can come of."""
        if self.canaries < 10:
            raise FedveilError(f"canaries must be 10 or more (got {self.canaries}): fewer tell nothing")
        if self.rounds < 1:
            raise FedveilError(f"rounds must be 1 or more (got {self.rounds})")
        if self.batch_size is not None and self.batch_size < 1:
            raise FedveilError(f"batch_size must be 1 or more (got {self.batch_size})")
        if not 0 < self.delta < 1:
            raise FedveilError(f"delta must be between 0 and 1 (got {self.delta:g})")
        if not 0.5 <= self.confidence < 1:
            raise FedveilError(f"confidence must be at least 0.5 and below 1 (got {self.confidence:g})")


def audit_privacy(
    defense: Defense | Chain | Sequence[Defense] | str,
    task: Task,
    settings: CanarySettings | None = None,
    *,
    seed: int = 0,
) -> CanaryAudit:
    """Measure a lower bound of ε for a defense with a formal guarantee, and set it beside what is promised.

    >>> from fedveil.tasks.task import task
    >>> found = audit_privacy("dp-gaussian:epsilon=2", task("digits", model="mlp:hidden=[2]", limit=100))
    >>> found.epsilon < found.promised
    True
    """
    settings, chain = settings or CanarySettings(), Chain.of(defense)
    settings.check()
    protector = _protector(chain)
    if not isinstance(protector, SummedStep) and settings.batch_size is not None:
        raise FedveilError(f"batch_size is for dp-sgd: {protector.name} protects all data of a client at once")
    parameters = {name: p.detach() for name, p in task.model.named_parameters() if p.requires_grad}
    chain.check_parameters(parameters)
    size = sum(p.numel() for p in parameters.values())
    run = _Run(task, chain, protector, settings, seed, Tree.expand(parameters, 1), size)
    promised = statement(chain, run.exposure)
    if promised.epsilon is None:
        raise FedveilError(f"there is no promise to hold canaries against: {promised.sentence}")
    coins = generator(seed, "canaries", "coins").integers(0, 2, settings.canaries) == 1
    scores = run.scores(coins)
    sure = np.argsort(-np.abs(scores), kind="stable")
    right = ((scores > 0) == coins)[sure]
    options = guess_counts(settings.canaries)
    confidence = 1 - (1 - settings.confidence) / len(options)

    def bound(guesses: int, hits: int) -> float:
        return least_epsilon(settings.canaries, guesses, hits, settings.delta, confidence)

    found = [(bound(guesses, int(right[:guesses].sum())), guesses) for guesses in options]
    epsilon, guesses = max(found)
    return CanaryAudit(
        defense=str(chain),
        unit=protector.guarantee(run.exposure).protects,
        data=task.name,
        model=task.model_name,
        rounds=settings.rounds,
        example_rate=run.exposure.example_rate,
        canaries=settings.canaries,
        guesses=guesses,
        right=int(right[:guesses].sum()),
        epsilon=epsilon,
        promised=promised.epsilon,
        delta=settings.delta,
        confidence=settings.confidence,
        provable=max(bound(each, each) for each in options),
        seed=seed,
    )


def _protector(chain: Chain) -> Defense:
    """The one defense of a chain that canaries can try."""
    if len(chain.defenses) != 1:
        raise FedveilError("canaries try one defense at a time: name one that has a formal guarantee")
    (defense,) = chain.defenses
    clips = isinstance(getattr(defense, "clip", None), float)
    if not clips or not (isinstance(defense, SummedStep) or defense.acts_at in ("gradient", "upload", "server")):
        raise FedveilError(
            f"canaries try mechanisms that clip and add noise (dp-sgd, dp-gaussian, dp-clip, dp-laplace, cdp), and "
            f"{defense.name} is none"
        )
    return defense


@dataclass(frozen=True, eq=False)
class _Run:
    """Training with canaries, block after block: in each, every canary has an entry of the model to itself."""

    task: Task
    chain: Chain
    defense: Defense
    settings: CanarySettings
    seed: int
    start: Tree  # the model's parameters, one row
    size: int  # their number
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", Engine(self.task.model, self.task.loss, backend="loop"))

    @property
    def of_examples(self) -> bool:
        """Whether a canary is an example; else it is a client."""
        return isinstance(self.defense, SummedStep)

    @property
    def block(self) -> int:
        """Canaries of one run: each needs an entry of its own where they are added up."""
        most = self.size if self.of_examples or self.chain.aggregates else self.settings.canaries
        return max(1, min(most, self.settings.canaries, AT_ONCE // self.size))

    @property
    def exposure(self) -> Exposure:
        """What each unit releases over the run."""
        given, slots = self.settings.batch_size, self.block + self._real_examples
        return Exposure(
            parameters=self.size,
            rounds=self.settings.rounds,
            steps_per_round=1,
            sampling_rate=1.0,
            example_rate=1.0 if given is None or not self.of_examples else min(1.0, given / slots),
            delta=self.settings.delta,
        )

    @property
    def _real_examples(self) -> int:
        return min(REAL, len(self.task.train))

    def scores(self, coins: NDArray[np.bool_]) -> NDArray[np.float64]:
        """How much what was released speaks for each canary's coin being heads; 0: not at all."""
        kind = self._examples if self.of_examples else self._mean if self.chain.aggregates else self._clients
        parts = []
        for number, start in enumerate(range(0, len(coins), self.block)):
            own = torch.from_numpy(coins[start : start + self.block])
            order = generator(self.seed, "canaries", "entries", number).permutation(self.size)
            places = torch.from_numpy(order[np.arange(len(own)) % self.size])
            parts.append(kind(own, places, number).double().numpy())
        return np.concatenate(parts)

    # ---- the unit is an example ------------------------------------------------------------------------------

    def _examples(self, coins: Tensor, places: Tensor, number: int) -> Tensor:
        """DP-SGD of one client with real examples and those canaries that are in."""
        real, count = self._real_examples, len(coins)
        rows = torch.arange(real) * len(self.task.train) // real
        inputs, targets = self.task.train.batch(rows)
        slots = torch.arange(real + self.block)  # the last block has fewer canaries, and others are drawn as often
        size = min(self.settings.batch_size or len(slots), len(slots))
        params, states, buffers = self.start, self.chain.new_states(), self._buffers(1)
        score = torch.zeros(count, dtype=torch.float64)
        for step in range(self.settings.rounds):
            streams = Streams.seeded(self.seed, [number], "canaries", step)
            drawn = self.chain.sample(slots, size, streams)
            chosen = slots if drawn is None else drawn
            mine, theirs = chosen[chosen < real], chosen[(chosen >= real) & (chosen < real + count)] - real
            theirs = theirs[coins[theirs]]
            data = map_inputs(partial(_rows, index=mine), inputs), targets[mine][None]
            plain = ClientBatch(self.engine, params, buffers, *data, streams, planned=torch.tensor([size]))
            whole = _WithCanaries.of(plain, self._single(places[theirs], self._clip * TOO_LARGE))
            total = self.chain.part(whole, states)[1].update
            sent = self.chain.whole(total, whole.targets.shape[1], whole, states)
            known = self.chain.part(plain, self.chain.new_states())[1].update  # the auditor knows the real examples
            seen = (sent * size - known).flat()[0][places] / self._clip
            score += self._evidence(seen.double())
            moved, _ = sgd_step(params, sent, {}, lr=self.settings.lr)
            params = Tree(moved)
        return score

    def _evidence(self, seen: Tensor) -> Tensor:
        """log P(seen | in) − log P(seen | out), under the noise and the sampling that are promised."""
        promised = self.defense.guarantee(self.exposure).mechanism
        assert isinstance(promised, GaussianRelease)
        loss = (seen - 0.5) / promised.noise_multiplier**2
        rate = promised.sampling_rate
        if rate >= 1:
            return loss
        return torch.logaddexp(torch.full_like(loss, math.log1p(-rate)), loss + math.log(rate))

    # ---- the unit is a client ---------------------------------------------------------------------------------

    def _clients(self, coins: Tensor, places: Tensor, number: int) -> Tensor:
        """Clients whose whole update is a canary; each sends its own."""
        first = number * self.block
        score = torch.zeros(len(coins), dtype=torch.float64)
        sent_in = self._single(places, torch.where(coins, 1.0, -1.0) * self._clip * TOO_LARGE)
        for step in range(self.settings.rounds):
            streams = Streams.seeded(self.seed, range(first, first + len(coins)), "canaries", step)
            sent = self.chain.protect_message(sent_in, "gradient", streams, self.chain.new_states())
            score += sent.flat()[torch.arange(len(coins)), places].double()
        return score

    def _mean(self, coins: Tensor, places: Tensor, number: int) -> Tensor:
        """The same where a trusted server adds up what clients send, those of real ones with it."""
        canaries = self._single(places, torch.where(coins, 1.0, -1.0) * self._clip * TOO_LARGE)
        clients = [indices[:REAL] for indices in self.task.clients[:REAL]]
        params, score = self.start, torch.zeros(len(coins), dtype=torch.float64)
        for step in range(self.settings.rounds):
            real = Tree.concat([self._gradient(params, indices) for indices in clients])
            updates = Tree.concat([canaries, real])
            streams = Streams.seeded(self.seed, range(updates.count), "canaries", number, step)
            weights = torch.ones(updates.count)
            total = self.chain.aggregate(updates, weights, streams).map(lambda rows: rows.sum(0, keepdim=True))
            known = clipped(real, self._clip).map(lambda rows: rows.sum(0, keepdim=True))
            score += (total - known).flat()[0][places].double()
            mean = total / updates.count
            moved, _ = sgd_step(params, mean, {}, lr=self.settings.lr)
            params = Tree(moved)
        return score

    def _gradient(self, params: Tree, indices: Tensor) -> Tree:
        """The gradient of one real client."""
        inputs, targets = self.task.train.batch(indices)
        streams = Streams.seeded(self.seed, [0], "canaries", "real")
        one = map_inputs(lambda tensor: tensor[None], inputs), targets[None]
        return ClientBatch(self.engine, params, self._buffers(1), *one, streams).gradient()

    def _buffers(self, count: int) -> Tree:
        return Tree.expand({name: b.detach() for name, b in self.task.model.named_buffers()}, count)

    @property
    def _clip(self) -> float:
        return float(self.defense.clip)  # type: ignore[attr-defined]  # `_protector` has looked

    def _single(self, places: Tensor, value: Tensor | float) -> Tree:
        """A row for each place: the value in that entry of the model, and nothing elsewhere."""
        like = next(iter(self.start.values()))
        rows = torch.zeros(len(places), self.size, dtype=like.dtype)
        rows[torch.arange(len(places)), places] = torch.as_tensor(value, dtype=like.dtype)
        return self.start.unflat(rows)


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Some rows, as those of a single client."""
    return tensor[index][None]


@dataclass
class _WithCanaries(ClientBatch):
    """A batch of one client in which the gradients of the last examples are given, as canaries are."""

    real: ClientBatch | None = None
    canaries: Tree | None = None  # (canaries, ...)

    @classmethod
    def of(cls, real: ClientBatch, canaries: Tree) -> Self:
        """The real examples, and behind them a stand-in for each canary: only how many there are counts."""
        blank = torch.zeros(1, canaries.count, *real.targets.shape[2:], dtype=real.targets.dtype)
        return cls(
            real.engine,
            real.params,
            real.buffers,
            real.inputs,
            torch.cat([real.targets, blank], 1),
            real.streams,
            planned=real.planned,
            real=real,
            canaries=canaries,
        )

    def clipped_sum(self, bound: float) -> tuple[Tree, Tensor]:
        """The sum over the real examples and the canaries, and the loss of the real ones."""
        assert self.real is not None
        assert self.canaries is not None
        given = clipped(self.canaries, bound).map(lambda rows: rows.sum(0, keepdim=True))
        if not self.real.targets.shape[1]:
            return given, torch.zeros(1)
        found, loss = self.real.clipped_sum(bound)
        return found + given, loss
