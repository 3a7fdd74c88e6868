"""`statement`: what a chain of defenses promises over a run, in one sentence, and in a paragraph that says it all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.defenses.base import PLACES, Defense, chooses_batch, owns_step
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import ONE_EXAMPLE, Counted, Exposure, Guarantee, PureLDP
from fedveil.ledger.accountant import Composable, Spent, worst

_PREFIX = "Formal guarantee: "
# Ponomareva et al. 2023, "How to DP-fy ML": up to 10 is reasonable, beyond it there is weak to no protection.
_WEAK, _NOTHING = 10.0, 50.0
_LOW_BITS = (
    "The proof is about real numbers: in {} the low bits of noisy numbers tell a little of what the noise was added "
    "to, and no ε covers that."
)
_SIZES = (
    "How many examples a client has is not covered: it shows in the number of its steps, in the rate at which examples "
    "are drawn, and in its weight where weights go by size."
)
_SEEDED = (
    "In this simulation the noise is drawn from a seed, and who has the seed can take it off; deployments must draw it "
    "from the operating system."
)


@dataclass(frozen=True)
class Statement:
    """What is promised over a run."""

    sentence: str  # "Formal guarantee: ε = 3.2 at δ = 1e-5 for one training example over 30 rounds (...)."
    formal: bool
    epsilon: float | None  # of the one formal guarantee; None where there is none, or several
    delta: float | None
    paragraph: str  # the sentence, and what each defense does and does not promise
    holding: tuple[tuple[Defense, Guarantee], ...] = ()  # the formal guarantees that hold in this run


@dataclass(frozen=True)
class _Claim:
    """What one defense would promise, and why it does not here."""

    defense: Defense
    words: str
    epsilon: float
    delta: float
    guarantee: Guarantee
    against: str  # why the claim does not hold in this run; "" if it does

    @property
    def name(self) -> str:
        return self.defense.name


def statement(chain: Chain, exposure: Exposure | Sequence[Exposure | Sequence[Exposure]]) -> Statement:
    """Add up what the defenses of a chain promise over a run.

    exposure: of one client, or one for every kind of client; what is stated holds for the worst off. A client that
        sent differently at different times has several, which are composed.
    """
    given = (exposure,) if isinstance(exposure, Exposure) else tuple(exposure)
    clients = [(each,) if isinstance(each, Exposure) else tuple(each) for each in given]
    first = clients[0][0]
    promises = [(defense, defense.guarantee(first)) for defense in chain.defenses]
    claims = [_claim(chain, position, clients) for position, (_, each) in enumerate(promises) if each.formal]
    valid = [claim for claim in claims if not claim.against]
    sentence = _sentence(promises, claims, valid)
    single = valid[0] if len(valid) == 1 else None
    return Statement(
        sentence=sentence,
        formal=bool(valid),
        epsilon=single.epsilon if single else None,
        delta=single.delta if single else None,
        paragraph=_paragraph(sentence, promises, claims, first),
        holding=tuple((claim.defense, claim.guarantee) for claim in valid),
    )


def together(parts: Sequence[Statement]) -> Statement:
    """What is promised over releases under several chains, each stated by itself: their ε and δ add up."""
    if not parts:
        return Statement(f"{_PREFIX}none.", False, None, None, f"{_PREFIX}none.")
    if len(parts) == 1:
        return parts[0]
    single = [part.holding[0][1] for part in parts if len(part.holding) == 1]
    units = {guarantee.protects for guarantee in single}
    each = " ".join(f"({number}) {part.paragraph}" for number, part in enumerate(parts, 1))
    if len(single) < len(parts) or len(units) > 1:
        sentence = f"{_PREFIX}none that covers all {len(parts)} chains of defenses."
        return Statement(sentence, False, None, None, f"{sentence} {each}")
    epsilon, delta = (sum(getattr(part, name) for part in parts) for name in ("epsilon", "delta"))
    at = f" at δ = {delta:.2g}" if delta else ""
    sentence = (
        f"{_PREFIX}ε = {_number(epsilon)}{at} for {units.pop()} over {len(parts)} chains of defenses "
        f"(basic composition){_worth(epsilon)}."
    )
    sentence = " ".join([sentence, *dict.fromkeys(guarantee.caveat for guarantee in single if guarantee.caveat)])
    return Statement(sentence, True, epsilon, delta, f"{sentence} {each}", sum((part.holding for part in parts), ()))


def _claim(chain: Chain, position: int, clients: Sequence[Sequence[Exposure]]) -> _Claim:
    defense, first = chain.defenses[position], clients[0][0]
    promised = defense.guarantee(first)
    mechanisms = [[defense.guarantee(part).mechanism for part in parts] for parts in clients]
    pure = [each for client in mechanisms for each in client if isinstance(each, PureLDP)]
    times = max(sum(part.uses(defense.acts_at) for part in parts) for parts in clients)
    if pure:
        one = max(pure, key=lambda mechanism: mechanism.epsilon * mechanism.coordinates)
        found = Spent(one.epsilon * one.coordinates * times, 0.0, "basic composition")
        words = (
            f"ε = {_number(one.epsilon)} per release for {promised.protects or 'each coordinate'}; composed over "
            f"{_count(one.coordinates, 'coordinate')} and {_over(first, times)} ε = {_number(found.epsilon)}"
            f"{_worth(found.epsilon)}"
        )
    else:
        composable = [[each for each in client if isinstance(each, Composable)] for client in mechanisms]
        found = worst(composable, first.delta)
        at = f" at δ = {found.delta:.2g}" if found.delta else ""
        over = _count(first.rounds, "round") if first.rounds else _count(times, "release")
        words = (
            f"ε = {_number(found.epsilon)}{at} for {promised.protects} over {over} ({found.how}){_worth(found.epsilon)}"
        )
    return _Claim(defense, words, found.epsilon, found.delta, promised, _why_not(chain, position, promised, first))


def _over(exposure: Exposure, times: int) -> str:
    rounds = _count(exposure.rounds, "round")
    if not exposure.rounds:
        return _count(times, "release")
    return rounds if times == exposure.rounds else f"{times:,} releases in {rounds}"


def _why_not(chain: Chain, position: int, guarantee: Guarantee, exposure: Exposure) -> str:
    """Why a guarantee does not hold in this run, if it does not."""
    if exposure.bare_rounds:
        first = f"the first {exposure.bare_rounds} rounds run" if exposure.bare_rounds > 1 else "the first round runs"
        return f"{first} without it"
    if isinstance(exposure, Counted) and exposure.bare:
        return f"{_count(exposure.bare, 'message')} went out without it"
    if exposure.bare_buffers:
        return "the model's buffers (batch norm statistics) are shared beside the update, without noise"
    own, order = chain.defenses[position], _in_running_order(chain)
    if guarantee.protects == ONE_EXAMPLE:
        mixing = [each.name for each in order if each is not own and _mixes(each)]
        if mixing:
            return f"{' and '.join(mixing)} before it may let one example act on the gradients of others"
    behind = order[[each is own for each in order].index(True) + 1 :]
    later = [each.name for each in behind if each.reads_data]
    return f"{' and '.join(later)} behind it may look at the data again" if later else ""


def _in_running_order(chain: Chain) -> list[Defense]:
    """The order within a step: its owner comes right after the data defenses, wherever it is in the chain."""

    def when(defense: Defense) -> float:
        return PLACES.index("data") + 0.5 if owns_step(defense) else PLACES.index(defense.acts_at)

    return sorted(chain.defenses, key=when)  # stable


def _mixes(defense: Defense) -> bool:
    """Whether a defense may tie the examples of a batch to each other before their gradients are taken."""
    return chooses_batch(defense) or defense.acts_at in ("sample", "data")


# ---- words -------------------------------------------------------------------------------------------------


def _sentence(promises: list[tuple[Defense, Guarantee]], claims: list[_Claim], valid: list[_Claim]) -> str:
    if len(valid) == 1:
        return " ".join(filter(None, (f"{_PREFIX}{valid[0].words}.", valid[0].guarantee.caveat)))
    if valid:
        each = "; ".join(f"{claim.name}: {claim.words}" for claim in valid)
        caveats = [f"{claim.name}: {claim.guarantee.caveat}" for claim in valid if claim.guarantee.caveat]
        return " ".join([f"Formal guarantees, each by itself, not to be added or combined: {each}.", *caveats])
    if claims:
        would = " ".join(f"By itself {claim.name} would give {claim.words}, but {claim.against}." for claim in claims)
        return f"{_PREFIX}none. {would}"
    if len(promises) == 1:
        return promises[0][1].sentence
    return f"{_PREFIX}none."


def _paragraph(
    sentence: str, promises: list[tuple[Defense, Guarantee]], claims: list[_Claim], exposure: Exposure
) -> str:
    parts = [sentence]
    if claims or len(promises) > 1:
        # The sentence has told all about guarantees per coordinate, composed and with their caveat.
        told = {c.name for c in claims if isinstance(c.guarantee.mechanism, PureLDP) and not c.against}
        rest = [(defense.name, each.sentence) for defense, each in promises if defense.name not in told]
        parts += [f"{name}: {said.removeprefix(_PREFIX)}" for name, said in rest]
    if any(claim.against for claim in claims) and not all(claim.against for claim in claims):
        parts += [f"{claim.name} gives nothing here: {claim.against}." for claim in claims if claim.against]
    if claims:
        if exposure.sampling_rate < 1 and any(d.acts_at != "server" and each.formal for d, each in promises):
            who = "the client that took part most" if isinstance(exposure, Counted) else "one that is in every round"
            parts.append(f"On the clients' side ε is that of {who}.")
        parts += [_LOW_BITS.format(" and ".join(exposure.dtypes)), _SIZES]
        parts += [_SEEDED] if exposure.seeded else []
    return " ".join(parts)


def _worth(epsilon: float) -> str:
    if epsilon > _NOTHING:
        return ", which is no protection"
    return ", which is weak" if epsilon > _WEAK else ""


def _number(epsilon: float) -> str:
    """Three digits, rounded up: a smaller ε than was proven must not be stated.

    >>> _number(3.1416), _number(12), _number(2665560.2), _number(math.inf)
    ('3.15', '12', '2,665,561', '∞')
    """
    if math.isinf(epsilon):
        return "∞"
    if epsilon >= 1000:
        return f"{math.ceil(epsilon):,}" if epsilon < 1e9 else f"{epsilon:.2e}"
    if epsilon == 0:
        return "0"
    digits = 2 - math.floor(math.log10(epsilon))
    return f"{math.ceil(round(epsilon * 10**digits, 6)) / 10**digits:.3g}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
