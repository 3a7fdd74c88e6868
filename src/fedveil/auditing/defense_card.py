"""The defense for the reader: what it does, promises and is known to be weak against."""

from __future__ import annotations

import inspect

from fedveil.auditing.result import DefenseCard
from fedveil.defenses.base import Defense, Place
from fedveil.defenses.chain import Chain
from fedveil.federation.history import Perturbation
from fedveil.fields import field_values
from fedveil.ledger.statement import Statement
from fedveil.tree import Tree

_PLACES: dict[Place, str] = {
    "sample": "the composition of every batch",
    "data": "the inputs of every step",
    "gradient": "the gradient of every step",
    "upload": "the update before it is uploaded",
    "server": "the updates on the server",
}


def defense_card(
    chain: Chain,
    promised: Statement,
    true: Tree | None = None,
    shared: Tree | None = None,
    moved: Perturbation | None = None,
) -> DefenseCard:
    """The defense for the reader and, where the true update is at hand too, what it does to the shared one."""
    if not chain.defenses:
        return DefenseCard(
            name="none",
            settings={},
            spelled="none",
            summary="No defense: updates are shared as they are.",
            acts_on="nothing",
            guarantee=promised.paragraph,
            formal=False,
            weaknesses=["Updates are shared as they are."],
            paper="",
        )
    facts = {}
    if true is not None and shared is not None:
        cosine = (true.dot(shared) / (true.norm() * shared.norm()).clamp_min(1e-30)).mean()
        facts["measured cosine to the true update"] = f"{float(cosine):.3f}"
        for defense in chain.defenses:
            facts |= {name: f"{value:.3g}" for name, value in defense.measures(true).items()}
    if moved is not None:
        facts["the perturbation of the inputs"] = str(moved)
    papers = [defense.paper for defense in chain.defenses if defense.paper]
    places = dict.fromkeys(_PLACES[defense.acts_at] for defense in chain.defenses)
    return DefenseCard(
        name=" + ".join(defense.name for defense in chain.defenses),
        settings={
            (name if len(chain.defenses) == 1 else f"{defense.name}.{name}"): value
            for defense in chain.defenses
            for name, value in field_values(defense).items()
        },
        spelled=str(chain),
        summary=" ".join(_summary(defense) for defense in chain.defenses),
        acts_on=", then ".join(places),
        guarantee=promised.paragraph,
        formal=promised.formal,
        weaknesses=[weakness for defense in chain.defenses for weakness in defense.weaknesses],
        paper="; ".join(papers),
        uninformed=list(chain.without_knowledge),
        facts=facts,
    )


def _summary(defense: Defense) -> str:
    """The first line of the class's docstring, as `fedveil list` shows it too; the class need not be registered."""
    return (inspect.getdoc(type(defense)) or "").partition("\n")[0]
