"""What was attacked and supposed, what the attacker was not given, and what was not tried, in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedveil.auditing.result import Assumption
from fedveil.auditing.settings import AuditSettings
from fedveil.defenses.chain import Chain
from fedveil.federation.settings import FederationSettings
from fedveil.registry import attacks as attack_registry
from fedveil.tasks.task import Task

_LABELS = {
    "known": "The attacker knows the labels of the batch; they can usually be read off the last layer.",
    "idlg": "The attacker reads the label of a single example off the last layer's gradient.",
    "recovered": "The attacker reads the labels of the batch, with repeats, off the last layer's gradient.",
    "optimized": "The attacker searches for the labels together with the inputs.",
}


def protocol_words(task: Task, federation: FederationSettings) -> str:
    """The protocol in a few words: "FedSGD, 4 clients, batch 8"."""
    name = {"fedsgd": "FedSGD", "fedavg": "FedAvg"}[federation.protocol]
    local = f", {federation.local_epochs} local epochs" if federation.local_epochs > 1 else ""
    return f"{name}, {len(task.clients)} clients, batch {federation.batch_size}{local}"


def attacked_words(task: Task, federation: FederationSettings, settings: AuditSettings) -> str:
    """What was attacked: "16 updates of one image each, at the untrained model"."""
    size, count = settings.batch_size, settings.victims
    images = "one image" if size == 1 else f"{size} images"
    updates = f"{count} updates of {images} each" if count > 1 else f"one update of {images}"
    if federation.protocol == "fedavg" and federation.local_epochs > 1:
        updates += f" ({federation.local_epochs} local epochs)"
    # A model built by name starts from random weights; the user's own may have been trained before.
    first = "at the untrained model" if "split" in task.description else "at the model as it was given"
    places = [first if number == 1 else f"at the start of round {number}" for number in settings.rounds]
    if len(places) == 1:
        return f"{updates}, {places[0]}"
    return f"{updates}, in each of {len(places)} rounds: {', '.join(places[:-1])} and {places[-1]}"


@dataclass(frozen=True)
class Attempted:
    """What the attacks of an audit were, as far as the threat model speaks of them."""

    attacks: tuple[str, ...]  # by name
    labels: tuple[str, ...] = ()  # where those that rebuild inputs get the labels from
    candidates: int | None = None  # that those who link updates are given; None where none does


def assumptions(
    task: Task, chain: Chain, attempted: Attempted, federation: FederationSettings, settings: AuditSettings
) -> list[Assumption]:
    """The threat model, switch by switch."""
    labels = sorted(set(attempted.labels))
    size = settings.batch_size
    found = [
        Assumption(
            switch="attacker",
            setting="honest-but-curious server",
            words="The attacker receives updates as the server does (or listens in), follows the protocol, and knows "
            "the model, its weights, the loss, the learning rate, the batch size and the normalization of the data.",
        ),
        *(
            [Assumption(switch="labels", setting=", ".join(labels), words=" ".join(_LABELS[each] for each in labels))]
            if labels
            else []
        ),
        Assumption(
            switch="attacked update",
            setting=f"{size} example{'s' if size > 1 else ''}, round {', '.join(map(str, settings.rounds))}",
            words=f"Each of {settings.victims} updates per attacked round is made from {size} "
            f"example{'s' if size > 1 else ''}"
            + (f"; training itself uses batches of {federation.batch_size}, which leak less" if size == 1 else "")
            + ". Round 1 attacks the model before training.",
        ),
        Assumption(
            switch="knowledge of the defense",
            setting={"both": "without and with", "naive": "without", "adaptive": "with"}[settings.attackers],
            words=_knowledge_words(chain),
        ),
        Assumption(
            switch="batch-norm statistics",
            setting="not known" if _batch_norm(task.model) else "none in this model",
            words="The statistics of the victim's batch are not given to the attacker."
            if _batch_norm(task.model)
            else "The model has no batch norm.",
        ),
    ]
    if attempted.candidates is not None:
        found.append(
            Assumption(
                switch="known candidates",
                setting=f"{attempted.candidates} for each update",
                words="To link an update, and for that alone, the attacker is given the examples behind it among "
                "others, with their labels, and has to say which they are. Think of one who holds some records and "
                "asks which of them was used.",
            )
        )
    if federation.protocol == "fedavg":
        words = {
            "unrolled": "The attacker repeats the local steps, supposing that every epoch walks through the examples "
            "in the same order.",
            "pseudo-gradient": "The attacker takes the change of the weights for one gradient.",
        }
        found.append(Assumption(switch="local steps", setting=settings.local_steps, words=words[settings.local_steps]))
    if _dropout(task.model):
        found.append(
            Assumption(
                switch="dropout masks",
                setting="not known",
                words="The model drops units at random; the attacker does not know which and matches without dropout. "
                "This alone can make an attack fail: do not take it for the defense's merit.",
            )
        )
    return found


def _knowledge_words(chain: Chain) -> str:
    if not chain.defenses:
        return "There is no defense to know."
    words = (
        "The naive attacker takes the update as it is. The adaptive attacker knows the defense and its settings, not "
        "its random draws."
    )
    if chain.without_knowledge:
        words += (
            f" But {' and '.join(chain.without_knowledge)} does not say what knowing it tells: there the adaptive "
            "attacker knows no more than the naive one."
        )
    return words


def not_given(task: Task, attempted: Attempted) -> list[str]:
    """What the attacker had to do without."""
    linking = " (who links updates has the examples behind them among others)" if attempted.candidates else ""
    items = [
        f"the clients' data, or any part of it{linking}",
        "the random numbers that the defense drew",
        "other data of the same kind, beyond its normalization",
    ]
    return items + (["the statistics of the victim's batch"] if _batch_norm(task.model) else [])


def not_tried(chain: Chain, attempted: Attempted, federation: FederationSettings, settings: AuditSettings) -> list[str]:
    """What a stronger attacker might do: absence here is no evidence of safety."""
    others = sorted(attack_registry.entries().keys() - set(attempted.attacks))
    items = [f"the attacks {', '.join(others)}"] if others else []
    items += [
        "attacks with a learned prior on the images (generators, diffusion models)",
        "combining the updates of one client over many rounds",
        "a malicious server that changes the model to make it leak",
        "membership inference and attacks on the finished model",
    ]
    if chain.defenses and (settings.attackers == "naive" or chain.without_knowledge):
        items.insert(0, "an attacker who knows the defense")
    if federation.protocol == "fedsgd" and settings.batch_size == 1 and federation.batch_size > 1:
        items.append(f"updates of whole batches of {federation.batch_size}, as training sends them (set batch_size)")
    return items


def _batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
