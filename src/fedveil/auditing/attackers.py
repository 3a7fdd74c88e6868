"""The attacker behind every row of a table: what an attack has, and what its role adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fedveil.attacks.base import Attack
from fedveil.attacks.threat import ThreatModel
from fedveil.auditing.auxiliary import Auxiliary
from fedveil.auditing.roles import ATTACKERS, Role

_ADDED: dict[Role, ThreatModel] = {
    "ceiling": ThreatModel(has=("undefended updates",)),
    "naive": ThreatModel(),
    "adaptive": ThreatModel(knows=("the defense",)),
    "noise-floor": ThreatModel(has=("no update",)),
    "mean-floor": ThreatModel(has=("no update", "the mean of the training data")),
    "bound": ThreatModel(has=("the perturbed input",)),
}
_ADDED_OF_MODEL: dict[Role, ThreatModel] = {
    "ceiling": ThreatModel(has=("the model trained without a defense",)),
    "naive": ThreatModel(has=("the trained model",)),
    "adaptive": ThreatModel(has=("the trained model",), knows=("the defense",)),
    "noise-floor": ThreatModel(has=("noise for what was learned",)),
}


def threats_of(attacks: Iterable[Attack], auxiliary: Auxiliary | None, among: int) -> dict[str, ThreatModel]:
    """The threat model of every attack by its name, with how much of everything there is.

    among: the candidates of those who link.
    """
    details = {"auxiliary data": f"({auxiliary.count})" if auxiliary else "", "candidates": f"({among}, one is right)"}

    def detailed(model: ThreatModel) -> ThreatModel:
        return replace(model, has=tuple(f"{each} {details.get(each, '')}".strip() for each in model.has))

    return {attack.name: detailed(attack.threat) for attack in attacks}


def threat_of_row(
    attack: str, role: Role, threats: Mapping[str, ThreatModel], views: int = 1, *, of_model: bool = False
) -> ThreatModel:
    """That of one attack in one role; of no attack, what its role has.

    views: messages about each batch that those who attack defended updates saw.
    of_model: it looks at the trained model alone, and at no update.
    """
    if of_model:
        return ThreatModel.union([_ADDED_OF_MODEL[role], threats.get(attack, ThreatModel())])
    saw = ThreatModel(may=(saw_words(views),)) if views > 1 and role in ATTACKERS else ThreatModel()
    return ThreatModel.union([_ADDED[role], threats.get(attack, ThreatModel()), saw])


def saw_words(views: int) -> str:
    """How much an attacker saw who saw several messages.

    >>> saw_words(16)
    'saw 16 messages about each batch'
    """
    return f"saw {views} messages about each batch"
