"""Chains: several defenses composed in the order in which they act."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.clients.engine import Gradients
from fedveil.defenses.base import (
    PLACES,
    Call,
    Defense,
    Facts,
    Knowledge,
    MessageKind,
    OwnModels,
    Place,
    SummedStep,
    chooses_batch,
    combined,
    keeps_models,
    owns_step,
    perturbs,
    require_declared,
    states_knowledge,
    trusting,
    undo,
)
from fedveil.defenses.none import NoDefense
from fedveil.errors import FedveilError
from fedveil.registry import defenses as registry
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs
from fedveil.tree import Tree, require_real

BETWEEN = r"\+(?=\s*[A-Za-z])"  # a name follows; the plus sign of 1e+06 stays
_WORDS: dict[MessageKind, str] = {"gradient": "a gradient", "weights": "weights", "delta": "a change of weights"}
_ACTS: dict[Place, str] = {
    "sample": "on the choice of a batch",
    "data": "on a client's data",
    "gradient": "on the gradient of every step",
    "upload": "on the upload",
    "server": "on the server",
}
States = list[dict[str, Tensor]]  # the memory of each defense of a chain, by its position, stacked over K clients


@dataclass(frozen=True)
class Chain:
    """Defenses in the order they run: by place (sample, data, gradient, upload, server), then as given.

    At most one may own the whole step; the data defenses before it hand it their inputs, the gradient defenses
    after it get its update. "none" does nothing and is left out: no chain holds it.

    >>> Chain.of("none").defenses
    ()
    """

    defenses: tuple[Defense, ...] = ()

    def __post_init__(self) -> None:
        for defense in self.defenses:
            require_declared(defense)
        active = [defense for defense in self.defenses if not isinstance(defense, NoDefense)]
        ordered = sorted(active, key=lambda defense: PLACES.index(defense.acts_at))  # stable
        object.__setattr__(self, "defenses", tuple(ordered))
        owners = [defense.name for defense in ordered if owns_step(defense)]
        if len(owners) > 1:
            raise FedveilError(f"{' and '.join(owners)} each own the whole step: a chain may hold one of them")

    @classmethod
    def of(cls, defense: Defense | Chain | Sequence[Defense] | str | None) -> Chain:
        """A chain from whatever names one: a defense, several, `"clip:norm=1+gaussian-noise"`, or None."""
        if isinstance(defense, Chain):
            return defense
        if isinstance(defense, str):
            return cls(tuple(registry.parse(part) for part in re.split(BETWEEN, defense)))
        if defense is None:
            return cls()
        return cls(tuple(defense) if isinstance(defense, list | tuple) else (defense,))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "+".join(registry.spell(defense) for defense in self.defenses) or "none"

    def new_states(self) -> States:
        """An empty memory for every defense."""
        return [{} for _ in self.defenses]

    def check_message(self, kind: MessageKind) -> None:
        """Refuse a defense that cannot protect what this protocol sends."""
        for defense in self.defenses:
            # Before the upload a defense acts on the gradient of a step, whatever is sent in the end.
            met = kind if defense.acts_at in ("upload", "server") else "gradient"
            if met not in defense.of:
                able = " or ".join(_WORDS[kind] for kind in defense.of)
                if kind == "gradient":
                    remedy = "use the protocol fedavg"
                else:
                    remedy = (
                        "use upload='delta'" if kind == "weights" and "delta" in defense.of else "use another defense"
                    )
                raise FedveilError(f"{defense.name} protects {able}, but here it would meet {_WORDS[met]}: {remedy}")

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse a model with parameters that would go out unprotected, or that a defense cannot protect."""
        require_real(parameters)
        for defense in self.defenses:
            defense.check_parameters(parameters)

    # ---- the client's side -----------------------------------------------------------------------------

    def step(self, batch: ClientBatch, states: States) -> StepResult:
        """One step of K clients: perturb the data, take the gradient, protect it."""
        batch = self._perturbed(batch, states)
        owner = self._owner
        shared = owner[1].gradient(batch.at(owner[0], states[owner[0]])) if owner else batch.share()
        update = self._protected("gradient", shared.update, batch.streams, states, batch)
        return shared if update is shared.update else replace(shared, update=update)

    def step_of(self, shared: Gradients, batch: ClientBatch, states: States) -> Gradients:
        """The same where the gradient is known already: no defense acts before it (`acts_on_data`)."""
        return shared._replace(update=self._protected("gradient", shared.update, batch.streams, states, batch))

    def gradient_alone(self, update: Tree, streams: Streams, states: States) -> Tree:
        """Protect a gradient where there is no data. A defense that needs a batch is refused."""
        return self._protected("gradient", update, streams, states, None)

    def upload(self, update: Tree, batch: ClientBatch, states: States) -> Tree:
        """Protect what is uploaded at the end of a round (under FedSGD: every gradient)."""
        return self._protected("upload", update, batch.streams, states, batch)

    def upload_alone(self, update: Tree, streams: Streams, states: States) -> Tree:
        """The same where there is no data, only the update. A defense that needs a batch is refused."""
        return self._protected("upload", update, streams, states, None)

    def protect_message(self, update: Tree, kind: MessageKind, streams: Streams, states: States) -> Tree:
        """Protect a message where only the update is at hand, as in a filter on a client's outgoing messages.

        A chain that should have acted earlier, on data or on the gradients of local steps, is refused: without those
        defenses the message would be less protected than the chain promises.
        """
        self.check_message(kind)
        places: tuple[Place, ...] = ("gradient", "upload") if kind == "gradient" else ("upload",)
        early = [defense for defense in self.defenses if defense.acts_at not in places or owns_step(defense)]
        if early:
            raise FedveilError(
                f"{early[0].name} acts {_ACTS[early[0].acts_at]}, and here is only {_WORDS[kind]} to be sent: "
                "use a defense of the upload, or one with at='upload'"
            )
        for place in places:
            update = self._protected(place, update, streams, states, None)
        return update

    def _protected(
        self, place: Place, update: Tree, streams: Streams, states: States, batch: ClientBatch | None
    ) -> Tree:
        require_real(update)
        for position, defense in self._at(place):
            own = streams.fold("place", position)
            # Only defenses that declare it get the data.
            data = batch.at(position, states[position]) if batch and "batch" in defense.needs else None
            update = defense.protect(update, Call(own, states[position], data))
        return update

    @cached_property
    def _owner(self) -> tuple[int, Defense] | None:
        return next((each for each in enumerate(self.defenses) if owns_step(each[1])), None)

    def _perturbed(self, batch: ClientBatch, states: States) -> ClientBatch:
        """The batch as the data defenses leave it, for whoever takes the gradient."""
        for position, defense in self._at("data"):
            if not owns_step(defense) and batch.targets.shape[1]:  # in an empty batch there is nothing to perturb
                batch = replace(batch, inputs=defense.perturb(batch.at(position, states[position])))
        return batch

    def moved(self, batch: ClientBatch) -> Inputs:
        """Where, to first order, the gradient of this batch would be taken. Nothing is remembered."""
        for position, defense in self._at("data"):
            if batch.targets.shape[1]:
                batch = replace(batch, inputs=defense.moves(batch.at(position, {})))
        return batch.inputs

    # ---- a step in micro-batches -----------------------------------------------------------------------

    def check_adds_up(self) -> None:
        """Refuse a defense whose step is not a sum over micro-batches."""
        owner = self._owner
        if owner and not isinstance(owner[1], SummedStep):
            raise FedveilError(f"{owner[1].name} needs all examples of a step at once: it cannot accumulate gradients")

    def part(self, batch: ClientBatch, states: States) -> tuple[ClientBatch, StepResult]:
        """What one micro-batch adds to a step, a sum over its examples, and the batch as the data defenses left it.

        It is not protected yet and must not go out: `whole` protects the sum.
        """
        batch = self._perturbed(batch, states)
        owner = self._owner
        if owner and isinstance(owner[1], SummedStep):
            return batch, owner[1].total(batch.at(owner[0], states[owner[0]]))
        shared = batch.share()
        return batch, replace(shared, update=shared.update * batch.targets.shape[1])

    def whole(self, total: Tree, size: int, batch: ClientBatch, states: States) -> Tree:
        """The protected gradient of a step from the sum over its `size` examples. `batch` has all of them."""
        owner = self._owner
        if owner and isinstance(owner[1], SummedStep):
            update = owner[1].release(total, batch.at(owner[0], states[owner[0]]))
        else:
            update = total / size
        return self._protected("gradient", update, batch.streams, states, batch)

    @property
    def reads_data(self) -> bool:
        """Whether what acts on the gradient looks at the data behind it."""
        return any("batch" in defense.needs for _, defense in self._at("gradient"))

    @cached_property
    def acts_on_data(self) -> bool:
        """Whether anything is done before the gradient is taken, or in its place."""
        return bool(self._at("data")) or self._owner is not None

    @cached_property
    def changes_gradient(self) -> bool:
        """Whether anything is done to a gradient once it is taken."""
        protects = any(type(defense).protect is not Defense.protect for _, defense in self._at("gradient"))
        return protects or self._owner is not None

    def own_models(self, batch: ClientBatch) -> list[OwnModels]:
        """What clients would keep for themselves at such a step. Nothing is shared or remembered."""
        kept = [(position, defense) for position, defense in enumerate(self.defenses) if keeps_models(defense)]
        if kept:
            batch = self._perturbed(batch, self.new_states())
        found = [defense.own_models(batch.at(position, {})) for position, defense in kept]
        return [models for models in found if models is not None]

    @property
    def composes(self) -> bool:
        """Whether a defense composes batches of a given size from a client's own examples."""
        return any(chooses_batch(defense) and not defense.random_sizes for defense in self.defenses)

    @cached_property
    def random_sizes(self) -> bool:
        """Whether a defense draws batches of random size: an empty one is shared too, or its absence would show."""
        return any(defense.random_sizes for defense in self.defenses)

    def sample(self, labels: Tensor, size: int, streams: Streams, *, fixed_size: bool = False) -> Tensor | None:
        """The batch that a defense chooses, or None if none does; `fixed_size`: skip those that draw random sizes."""
        for position, defense in enumerate(self.defenses):
            if not chooses_batch(defense) or (fixed_size and defense.random_sizes):
                continue
            # A path of its own: the choice must not share its random numbers with the noise.
            chosen = defense.sample(labels, size, streams.fold("place", position, "sample"))
            if chosen is not None:
                return chosen
        return None

    # ---- the server's side -----------------------------------------------------------------------------

    @property
    def aggregates(self) -> bool:
        """Whether a trusted server takes part: it then needs all updates of a step together."""
        return bool(self._at("server"))

    def aggregate(self, updates: Tree, weights: Tensor, streams: Streams) -> Tree:
        """What a trusted server does to the updates before it takes their mean."""
        for position, defense in self._at("server"):
            updates = defense.aggregate(updates, weights, streams.fold("place", position))
        return updates

    # ---- what an attacker can make of it (the ledger tells what is promised) -----------------------------

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Undo the chain from its end: each defense sees the estimate that the later ones left."""
        known = trusting(observed)
        for defense in reversed(self.defenses):
            known = undo(defense, known, facts)
        return known

    def knowledge_of(self, views: Sequence[Tree], facts: Facts) -> Knowledge:
        """The same of several messages about the same batch, each with random numbers of its own.

        Where one defense alone draws numbers, it says what all of them tell together: see `Defense.together`.
        """
        drawing = [place for place, defense in enumerate(self.defenses) if _draws(defense)]
        if len(drawing) != 1:
            return combined([self.knowledge(view, facts) for view in views])
        known = [trusting(view) for view in views]
        for defense in reversed(self.defenses[drawing[0] + 1 :]):
            known = [undo(defense, each, facts) for each in known]
        found = self.defenses[drawing[0]].together(known, facts)
        for defense in reversed(self.defenses[: drawing[0]]):
            found = undo(defense, found, facts)
        return found

    @property
    def states_knowledge(self) -> bool:
        """Whether any defense says what an attacker who knows it would do."""
        return len(self.without_knowledge) < len(self.defenses)

    @property
    def without_knowledge(self) -> tuple[str, ...]:
        """The names of the defenses that do not say what an attacker who knows them would do."""
        return tuple(defense.name for defense in self.defenses if not states_knowledge(defense))

    def _at(self, place: Place) -> list[tuple[int, Defense]]:
        return self._by_place[place]

    @cached_property
    def _by_place(self) -> dict[Place, list[tuple[int, Defense]]]:
        return {place: [each for each in enumerate(self.defenses) if each[1].acts_at == place] for place in PLACES}


def _draws(defense: Defense) -> bool:
    """Whether a defense makes another message of the same batch each time."""
    return defense.random and (type(defense).protect is not Defense.protect or owns_step(defense) or perturbs(defense))


@dataclass
class ClientStates:
    """The memory of every client and defense, across steps whose groups of clients differ."""

    _rows: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)

    def gather(self, clients: Sequence[int], chain: Chain) -> States:
        """The states of some clients of one layout, stacked."""
        if len({self.layout(client) for client in clients}) > 1:
            numbers = ", ".join(map(str, clients))
            raise FedveilError(f"the memories of clients {numbers} differ in layout: stack clients of one layout only")
        empty = chain.new_states()
        rows = [self._rows.get(client, empty) for client in clients]
        return [
            {name: torch.stack([row[position][name] for row in rows]) for name in rows[0][position]}
            for position in range(len(chain.defenses))
        ]

    def scatter(self, clients: Sequence[int], states: States) -> None:
        """Keep what a step left in the stacked states."""
        for k, client in enumerate(clients):
            self._rows[client] = [{name: tensor[k] for name, tensor in state.items()} for state in states]

    def of(self, clients: Sequence[int]) -> ClientStates:
        """The memories of some clients, to send to the process that trains them."""
        return ClientStates({client: self._rows[client] for client in clients if client in self._rows})

    def put(self, others: ClientStates) -> None:
        """Take over the memories of other clients."""
        self._rows |= others._rows

    def layout(self, client: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of a client's memory: only clients of one layout can be stacked."""
        states = enumerate(self._rows.get(client, ()))
        return tuple((f"{position} {name}", tuple(t.shape)) for position, state in states for name, t in state.items())

    def new_round(self, chain: Chain) -> None:
        """Forget what lasts a round only."""
        self._rows = self.lasting(chain)

    def lasting(self, chain: Chain) -> dict[int, States]:
        """Every client's memory that lasts over rounds, by position: what a checkpoint must keep."""
        scopes = [defense.state_scope for defense in chain.defenses]
        kept = {
            client: [state if scope == "run" else {} for scope, state in zip(scopes, states, strict=True)]
            for client, states in self._rows.items()
        }
        return {client: states for client, states in kept.items() if any(states)}
