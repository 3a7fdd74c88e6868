"""What was attacked and supposed, what the attacker was not given, and what was not tried, in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import nn

from fedveil.attacks.base import Attack
from fedveil.attacks.threat import STATISTICS
from fedveil.auditing.auxiliary import Auxiliary
from fedveil.auditing.result import Assumption
from fedveil.defenses.base import MessageKind
from fedveil.defenses.chain import Chain
from fedveil.leakage.modality import Words
from fedveil.registry import attacks as attack_registry

_LABELS = {
    "known": "The attacker knows the labels of the batch; they can usually be read off the last layer.",
    "idlg": "The attacker reads the label of a single example off the last layer's gradient.",
    "recovered": "The attacker reads the labels of the batch, with repeats, off the last layer's gradient.",
    "optimized": "The attacker searches for the labels together with the inputs.",
}
_LOCAL_STEPS = {
    "unrolled": "The attacker repeats the local steps.",
    "pseudo-gradient": "The attacker takes the change of the weights for one gradient.",
}
_STEP_ORDERS = {
    "searched": "Which examples a local step took is not known. The attacker looks for the order that explains the "
    "update best.",
    "same": "Which examples a local step took is not known. The attacker supposes that every epoch walks through them "
    "in the same order.",
    "mean": "Which examples a local step took is not known. The attacker supposes that every step took the mean "
    "gradient of all of them.",
}
PRIORS = frozenset({"gias", "latent-start"})  # attacks whose pictures come out of a generator that was trained for it
_MESSAGES: dict[MessageKind, str] = {
    "gradient": "gradients",
    "weights": "weights after {}",
    "delta": "changes of the weights over {}",
}


# ---- what was attacked ---------------------------------------------------------------------------------------


def protocol_words(protocol: str, clients: int, batch_size: int, local_epochs: int = 1) -> str:
    """The protocol in a few words.

    >>> protocol_words("fedsgd", 4, 8)
    'FedSGD, 4 clients, batch 8'
    """
    name = {"fedsgd": "FedSGD", "fedavg": "FedAvg"}[protocol]
    local = f", {local_epochs} local epochs" if local_epochs > 1 else ""
    return f"{name}, {clients} clients, batch {batch_size}{local}"


def message_words(kind: MessageKind, steps: int) -> str:
    """What captured updates are, where the protocol behind them is not known.

    >>> message_words("weights", 4)
    'weights after 4 local steps'
    """
    return _MESSAGES[kind].format(_many(steps, "local step"))


def attacked_words(count: int, examples: int, words: Words, local_epochs: int = 1) -> str:
    """How many updates of what were attacked.

    >>> from fedveil.leakage.pictures import Pictures
    >>> attacked_words(16, 1, Pictures.words)
    '16 updates of one image each'
    """
    behind = f"one {words.one}" if examples == 1 else f"{examples} {words.many}"
    updates = f"{count} updates of {behind} each" if count > 1 else f"one update of {behind}"
    return f"{updates} ({local_epochs} local epochs)" if local_epochs > 1 else updates


def in_rounds(rounds: Sequence[int], *, untrained: bool) -> str:
    """At which models an audit attacks.

    untrained: the first round starts from random weights; else it may have been trained before.
    """
    first = "at the untrained model" if untrained else "at the model as it was given"
    found = [first if number == 1 else f"at the start of round {number}" for number in rounds]
    if len(found) == 1:
        return found[0]
    return f"in each of {len(found)} rounds: {', '.join(found[:-1])} and {found[-1]}"


def captured_in(sources: Sequence[tuple[int, int]]) -> str:
    """Where captured updates come from, given the round and the client of each.

    >>> captured_in([(3, 0)]), captured_in([(1, 0), (1, 1)])
    ('captured in round 3 of client 0', 'captured in round 1 of 2 clients')
    """
    rounds, clients = (sorted(set(each)) for each in zip(*sources, strict=True))
    whose = f"client {clients[0]}" if len(clients) == 1 else f"{len(clients)} clients"
    return f"captured in {_listed(rounds, 'round')} of {whose}"


# ---- what was supposed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempted:
    """What the attacks were, as far as the threat model speaks of them."""

    attacks: tuple[str, ...]  # by name
    labels: tuple[str, ...] = ()  # where those that rebuild inputs get the labels from
    candidates: int | None = None  # that those who link updates are given; None where none does
    telling: tuple[str, ...] = ()  # the names of those who tell members from others
    auxiliary: Auxiliary | None = None  # what some of them learned from
    learned: tuple[str, ...] = ()  # the names of these
    statistics: tuple[str, ...] = ()  # the names of those that use the batch-norm statistics of the global model
    brought: Mapping[str, str] = field(default_factory=dict)  # what others have from elsewhere, by name
    left_out: Mapping[str, str] = field(default_factory=dict)  # why others were not run, by name

    @classmethod
    def of(
        cls,
        attacks: Sequence[Attack],
        among: int,
        auxiliary: Auxiliary | None = None,
        left_out: Mapping[str, str] | None = None,
    ) -> Self:
        """That of some attacks, with `among` candidates for those who link."""
        learned = tuple(each.name for each in attacks if "auxiliary" in each.needs)
        return cls(
            attacks=tuple(each.name for each in attacks),
            labels=tuple(each.labels_from for each in attacks if each.labels_from),
            candidates=among if any(each.question == "link" for each in attacks) else None,
            telling=tuple(each.name for each in attacks if each.question == "member"),
            auxiliary=auxiliary if learned else None,
            learned=learned if auxiliary is not None else (),
            statistics=tuple(each.name for each in attacks if STATISTICS in each.threat.knows),
            brought={each.name: each.brings for each in attacks if each.brings},
            left_out=left_out or {},
        )


@dataclass(frozen=True)
class Situation:
    """What attackers faced, in facts that an audit and captured updates both have."""

    model: nn.Module
    chain: Chain
    updates: int  # attacked in each of the rounds; captured ones in all
    examples: int  # behind each
    rounds: tuple[int, ...]
    attackers: str = "both"  # as `AuditSettings` has it
    local_steps: str | None = None  # how the local steps behind an update were attacked; None where there are none
    step_order: str | None = None  # what is supposed of the order of examples, where several steps make up an epoch
    trained_in: int | None = None  # examples of the batches that clients send in training, one by one
    captured: str | None = None  # what was captured, in words; None in an audit, which makes its own updates
    views: int = 1  # messages about each batch, each protected anew
    columns: int = 0  # of a table
    vocabulary: int = 0  # tokens, of text
    modality: str = "pictures"  # the kind of data
    stated: bool = True  # whether it is known which defense there is, or that there is none


def assumptions(situation: Situation, attempted: Attempted) -> list[Assumption]:
    """The threat model, switch by switch."""
    labels = sorted(set(attempted.labels))
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
        _attacked_update(situation),
        *_seen_again(situation),
        _knowledge(situation),
        _statistics(situation.model, attempted.statistics),
    ]
    if situation.columns:
        found.append(
            Assumption(
                switch="columns",
                setting=f"{situation.columns} known",
                words="The attacker knows the columns of the table: their names, the range, mean and deviation of "
                "numbers, and the list of categories. No cell of any row is known.",
            )
        )
    if situation.vocabulary:
        found.append(
            Assumption(
                switch="vocabulary",
                setting=f"{situation.vocabulary:,} tokens known",
                words="The attacker knows the tokenizer and how sentences are laid out: special tokens, padding, and "
                "the most tokens that an example can have. How long a sentence is, it has to find out.",
            )
        )
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
    if attempted.telling:
        found.append(
            Assumption(
                switch="examples in question",
                setting=f"to {_and(attempted.telling)}",
                words="To tell members from others, and for that alone, the attacker is given examples with their "
                "labels, some of which were used and some not, in a drawn order. The others are held out: nobody "
                "trained on them, and no attacker learned from them.",
            )
        )
    if attempted.auxiliary is not None:
        found.append(_auxiliary(attempted.auxiliary, attempted.learned))
    found += [_brought(name, what) for name, what in attempted.brought.items()]
    if situation.local_steps is not None:
        local = situation.local_steps
        found.append(Assumption(switch="local steps", setting=local, words=_LOCAL_STEPS[local]))
    if situation.local_steps == "unrolled" and situation.step_order is not None:
        order = situation.step_order
        found.append(Assumption(switch="order of the examples", setting=order, words=_STEP_ORDERS[order]))
    if _dropout(situation.model):
        found.append(
            Assumption(
                switch="dropout masks",
                setting="not known",
                words="The model drops units at random; the attacker does not know which and matches without dropout. "
                "This alone can make an attack fail: do not take it for the defense's merit.",
            )
        )
    return found


def _auxiliary(data: Auxiliary, learned: Sequence[str]) -> Assumption:
    words = (
        f"{_and(learned)} learned from {data.words}, with their labels, before any update was seen. None of these is "
        f"a client's, a victim's, or one that a victim's is told from. {data.told}"
    )
    return Assumption(switch="auxiliary data", setting=data.words, words=words.strip())


def _statistics(model: nn.Module, used_by: Sequence[str]) -> Assumption:
    setting, words = "none in this model", "The model has no batch norm."
    if _batch_norm(model):
        setting, words = "not known", "The statistics of the victim's batch are not given to the attacker."
    if _batch_norm(model) and used_by:
        setting = f"those of the global model, to {_and(used_by)}"
        words += (
            f" But {_and(used_by)} takes the running statistics of the global model for those of the victim's data, "
            "which holds if the clients' data are alike and their statistics are shared."
        )
    return Assumption(switch="batch-norm statistics", setting=setting, words=words)


def _brought(name: str, what: str) -> Assumption:
    words = (
        f"{name} has {what}, which it was given. Whether these hold examples of the clients or the victims was not "
        "checked: if they do, the attack gets more than it should."
    )
    return Assumption(switch=f"brought by {name}", setting=what, words=words)


def _attacked_update(situation: Situation) -> Assumption:
    examples = _many(situation.examples, "example")
    setting = f"{examples}, {_listed(situation.rounds, 'round')}"
    if situation.captured is not None:
        words = (
            f"The attacker has {_many(situation.updates, 'captured update')}. By what the capture says of itself, they "
            f"are {situation.captured}, of {examples} each."
        )
        return Assumption(switch="captured update", setting=setting, words=words)
    words = f"Each of {situation.updates} updates per attacked round is made from {examples}"
    if situation.examples == 1 < (situation.trained_in or 1):
        words += f"; training itself uses batches of {situation.trained_in}, which leak less"
    return Assumption(
        switch="attacked update", setting=setting, words=f"{words}. Round 1 attacks the model before training."
    )


def _seen_again(situation: Situation) -> list[Assumption]:
    """That several messages about each batch were seen, if they were."""
    views = situation.views
    if views == 1 or not situation.chain.defenses:
        return []
    words = (
        f"Who attacks defended updates saw {views} messages about each batch, all at the same model, each protected "
        "with fresh random numbers: as where a client sends the same batch again. What a defense draws anew each time "
        "can be averaged away."
    )
    return [Assumption(switch="messages about each batch", setting=str(views), words=words)]


def _knowledge(situation: Situation) -> Assumption:
    switch, chain = "knowledge of the defense", situation.chain
    if not chain.defenses:
        words = "There is no defense to know."
        if not situation.stated:
            words = "Whether there is a defense is not known: the attacker takes the updates as they are."
        return Assumption(switch=switch, setting="none", words=words)
    words = (
        "The naive attacker takes the update as it is. The adaptive attacker knows the defense and its settings, not "
        "its random draws."
    )
    if chain.without_knowledge:
        words += (
            f" But {' and '.join(chain.without_knowledge)} does not say what knowing it tells: there the adaptive "
            "attacker knows no more than the naive one."
        )
    setting = {"both": "without and with", "naive": "without", "adaptive": "with"}[situation.attackers]
    return Assumption(switch=switch, setting=setting, words=words)


# ---- what was withheld, and what was left out ------------------------------------------------------------------


def not_given(model: nn.Module, attempted: Attempted) -> list[str]:
    """What the attacker had to do without."""
    linking = " (who links updates has the examples behind them among others)" if attempted.candidates else ""
    if attempted.telling:
        linking = " (who links updates or tells members has examples that were used, among others)"
    others = "other data of the same kind, beyond its normalization"
    if attempted.auxiliary is not None:
        others += f" (but {_and(attempted.learned)} had {attempted.auxiliary.words})"
    others += "".join(f" (but {name} had {what})" for name, what in attempted.brought.items())
    items = [f"the clients' data, or any part of it{linking}", "the random numbers that the defense drew", others]
    return items + (["the statistics of the victim's batch"] if _batch_norm(model) else [])


def not_tried(situation: Situation, attempted: Attempted) -> list[str]:
    """What a stronger attacker might do: absence here is no evidence of safety."""
    registered = {name for name in attack_registry.entries() if _applies(name, situation.modality)}
    others = sorted(registered - {*attempted.attacks, *attempted.left_out})
    items = [f"the attack {name}: {why}" for name, why in attempted.left_out.items()]
    items += [f"the attacks {', '.join(others)}"] if others else []
    priors = "diffusion models" if PRIORS & set(attempted.attacks) else "generators, diffusion models"
    learned = f"images ({priors})" if situation.modality != "sentences" else "sentences (large language models)"
    items += [
        f"attacks with a learned prior on the {learned}",
        "combining the updates of one client over many rounds",
        "a malicious server that changes the model to make it leak",
        "other attacks on the finished model" if attempted.telling else "membership inference, the finished model",
    ]
    chain, batch = situation.chain, situation.trained_in
    if chain.defenses and (situation.attackers == "naive" or chain.without_knowledge):
        items.insert(0, "an attacker who knows the defense")
    if situation.captured is None and situation.views == 1 and any(each.random for each in chain.defenses):
        items.append("several messages about the same batch, over which fresh random numbers average out (set views)")
    if situation.examples == 1 and batch is not None and batch > 1:
        items.append(f"updates of whole batches of {batch}, as training sends them (set batch_size)")
    return items


def _applies(name: str, modality: str) -> bool:
    """Whether an attack takes this kind of data."""
    kinds: tuple[str, ...] = attack_registry.load(name).modalities  # type: ignore[attr-defined]
    return not kinds or modality in kinds


def _batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _listed(numbers: Sequence[int], what: str) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"
