"""`Ledger`: remembers every release that happened, and says what they spent together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import pydantic
from pydantic import Field

from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Counted, Exposure
from fedveil.errors import FedveilError
from fedveil.fields import problems
from fedveil.ledger.statement import Statement, statement, together

VERSION = 1
EVERYONE = None  # in place of a client: a release in which any client may have had a part, unseen


@dataclass(frozen=True)
class Release:
    """One thing that left a client, or a mean that a trusted server gave out.

    What counts is how often the defenses of each place acted on it. A FedSGD message is one gradient and one upload; a
    FedAvg message has several gradients behind it; in a loop of one's own a gradient may go out long before the upload.
    """

    chain: Chain = field(hash=False)  # what protected it; empty: it went out bare. A defense need not be hashable.
    gradients: int = 1  # steps behind it, each protected by the defenses of the gradient
    uploads: int = 1  # 1 if it went through the defenses of the upload, else 0
    means: int = 0  # means that a trusted server gave out, all of the same clients
    example_rate: float = 1.0  # the chance that an example is in a step; 1, if unknown, never states too small an ε
    client_rate: float = 1.0  # the chance that a client is in one of the means


class _Entry(pydantic.BaseModel):
    """A line of the ledger as it is kept."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    client: int | None
    times: Annotated[int, Field(ge=1)]
    chain: str
    gradients: Annotated[int, Field(ge=0)]
    uploads: Annotated[int, Field(ge=0)]
    means: Annotated[int, Field(ge=0)]
    example_rate: Annotated[float, Field(gt=0, le=1)]
    client_rate: Annotated[float, Field(gt=0, le=1)]


class _State(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    version: int
    parameters: int
    spent: list[_Entry]


class Ledger:
    """Counts what clients released, and composes it: over what happened, not over what was planned.

    `common` has what all releases share (the size and type of an update, δ, ...); its counts are not used.

    >>> from fedveil.defenses.dp_gaussian import DPGaussian
    >>> ledger = Ledger(Exposure(parameters=1000, rounds=0, steps_per_round=1, sampling_rate=1.0))
    >>> release = Release(Chain.of(DPGaussian(epsilon=1.0, delta=1e-5)))
    >>> for _ in range(4):
    ...     ledger.spend(0, release)
    >>> round(ledger.statement().epsilon, 2)
    2.15
    """

    def __init__(self, common: Exposure) -> None:
        self.common = common
        self._spent: dict[int | None, Counter[Release]] = {}

    def spend(self, client: int | None, release: Release, times: int = 1) -> None:
        """Note that a client released something, or EVERYONE: a mean in which any of them may have had a part."""
        if client not in self._spent:
            self._spent[client] = Counter()
        self._spent[client][release] += times

    def count(self, client: int | None) -> int:
        """How many releases of a client there were."""
        return sum(self._spent.get(client, Counter()).values())

    def exposures(self, chain: Chain) -> list[tuple[Counted, ...]]:
        """What clients sent under a chain, one part for each kind of release; those who sent less are left out."""
        anyone = self._spent.get(EVERYONE, Counter())
        clients = [kinds for client, kinds in self._spent.items() if client is not EVERYONE] or [Counter()]
        bare = max(sum(times for release, times in kinds.items() if not release.chain.defenses) for kinds in clients)
        found: list[Counter[Release]] = []
        for kinds in sorted(clients, key=lambda kinds: kinds.total(), reverse=True):
            mine = Counter({release: times for release, times in (kinds + anyone).items() if release.chain == chain})
            if not any(mine <= other for other in found):
                found.append(mine)
        nothing = Counter({Release(chain, 0, 0): 1})
        return [tuple(self._counted(*each, bare) for each in (mine or nothing).items()) for mine in found]

    def _counted(self, release: Release, times: int, bare: int) -> Counted:
        given = {each.name: getattr(self.common, each.name) for each in fields(Exposure)}
        given |= {"example_rate": release.example_rate, "steps_per_round": max(release.means, 1)}
        given |= {"sampling_rate": release.client_rate if release.means else self.common.sampling_rate}
        counts = {name: times * getattr(release, name) for name in ("gradients", "uploads", "means")}
        return Counted(**given, **counts, bare=bare)

    def statement(self, delta: float | None = None) -> Statement:
        """What all releases so far spent together, for the client that is worst off, at δ (that of `common`)."""
        chains: list[Chain] = []
        for release in (release for kinds in self._spent.values() for release in kinds):
            if release.chain.defenses and release.chain not in chains:
                chains.append(release.chain)
        if not self._spent:
            nothing = "Formal guarantee: nothing was released yet."
            return Statement(nothing, False, None, None, nothing)
        parts = []
        for chain in chains:
            clients = self.exposures(chain)
            if delta is not None:
                clients = [tuple(replace(part, delta=delta) for part in client) for client in clients]
            parts.append(statement(chain, clients))
        return together(parts)

    # ---- memory ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that was spent, in plain types that JSON can hold."""
        lines = [
            {"client": client, "times": times, **vars(release), "chain": str(release.chain)}
            for client, kinds in self._spent.items()
            for release, times in kinds.items()
        ]
        return {"version": VERSION, "parameters": self.common.parameters, "spent": lines}

    def load_state_dict(self, state: Mapping[str, Any], known: Iterable[Chain] = ()) -> None:
        """Go on from what `state_dict` gave. known: chains that need not be read from their spelling."""
        try:
            read = _State.model_validate(dict(state))
        except pydantic.ValidationError as error:
            raise FedveilError(f"not the state of a ledger: {problems(error)}") from None
        if read.version != VERSION:
            raise FedveilError(f"this ledger was kept in version {read.version}; this fedveil reads {VERSION}")
        if read.parameters != self.common.parameters:
            raise FedveilError(
                f"this ledger is of a model with {read.parameters:,} parameters, not {self.common.parameters:,}"
            )
        chains = {str(chain): chain for chain in known}
        spent: dict[int | None, Counter[Release]] = {}
        for line in read.spent:
            told = line.model_dump(exclude={"client", "times", "chain"})
            chain = chains[line.chain] if line.chain in chains else Chain.of(line.chain)
            spent.setdefault(line.client, Counter())[Release(chain, **told)] += line.times
        self._spent = spent
