"""Who stands behind a row of numbers, in all the words that tables, charts and reports use for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from fedveil.leakage.modality import Words

# "bound" is the perturbed input, though it bounds nothing: who replays the defense can come nearer to the original.
Role = Literal["ceiling", "naive", "adaptive", "noise-floor", "mean-floor", "bound"]
Kind = Literal["ceiling", "attacker", "floor", "input"]


@dataclass(frozen=True)
class RoleWords:
    """One role: what it is, and what it is called where."""

    kind: Kind
    title: str  # in the terminal's table
    who: str  # in the report's tables
    plain: str  # on the report's first screen, which needs no training to read
    label: str  # at the end of a line in a chart
    note: str  # what it means, for those who meet it for the first time


# In the order in which tables list them. What is in braces depends on the kind of data: see `wording`.
ROLES: dict[Role, RoleWords] = {
    "ceiling": RoleWords(
        kind="ceiling",
        title="undefended (ceiling)",
        who="No defense",
        plain="No defense",
        label="no defense",
        note="the attack on unprotected updates: what could leak",
    ),
    "naive": RoleWords(
        kind="attacker",
        title="defended, naive attacker",
        who="Does not know the defense",
        plain="Does not know the defense",
        label="does not know the defense",
        note="attacks the defended updates as if they were plain ones",
    ),
    "adaptive": RoleWords(
        kind="attacker",
        title="defended, adaptive attacker",
        who="Knows the defense",
        plain="Knows the defense",
        label="knows the defense",
        note="attacks the defended updates with all that knowing the defense tells",
    ),
    "noise-floor": RoleWords(
        kind="floor",
        title="floor: noise for the update",
        who="Floor: noise in place of the update",
        plain="A guess without the update",
        label="noise (floor)",
        note="the attack with nothing to learn from: what luck and the attack's own prior give",
    ),
    "mean-floor": RoleWords(
        kind="floor",
        title="floor: the {mean}",
        who="Floor: the {mean} of the training data",
        plain="A guess without the update",
        label="{mean}",
        note="no attack at all: always guess the {mean}",
    ),
    "bound": RoleWords(
        kind="input",
        title="the perturbed input",
        who="The perturbed input",
        plain="The perturbed input",
        label="perturbed input",
        note="no attack: the very input that the shared gradient was taken at, with whatever the defense did to it. "
        "Who inverts the gradient perfectly sees this; who also replays the defense can come nearer to the original",
    ),
}

# In place of "naive" where nobody knows of a defense, and where there is no undefended update to set beside.
_AS_THEY_ARE = RoleWords(
    kind="attacker",
    title="updates as they are",
    who="Takes updates as they are",
    plain="Takes updates as they are",
    label="updates as they are",
    note="attacks the updates as they are, without knowing of any defense",
)


def wording(present: Iterable[Role], data: Words) -> Mapping[Role, RoleWords]:
    """The words for the roles of one result.

    data: what the data are called.

    >>> from fedveil.leakage.pictures import Pictures
    >>> wording(["ceiling"], Pictures.words)["mean-floor"].label
    'mean image'
    """
    found = dict(ROLES) if {"ceiling", "adaptive"} & set(present) else {**ROLES, "naive": _AS_THEY_ARE}
    told = {part: text.format(mean=data.mean) for part, text in asdict(ROLES["mean-floor"]).items()}
    return found | {"mean-floor": RoleWords(**told)}


ATTACKERS: tuple[Role, ...] = tuple(role for role, words in ROLES.items() if words.kind == "attacker")
FLOORS: tuple[Role, ...] = tuple(role for role, words in ROLES.items() if words.kind == "floor")
