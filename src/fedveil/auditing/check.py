"""What is refused before any long work starts."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from fedveil.attacks.base import Attack
from fedveil.attacks.matching import Matching
from fedveil.auditing.asked import Asked
from fedveil.auditing.attacking import states_any_knowledge
from fedveil.auditing.judges import check_judges
from fedveil.auditing.settings import AuditSettings, AuditSettings
from fedveil.errors import FedveilError
from fedveil.leakage.modalities import modality
from fedveil.tasks.task import Task


def check(asked: Asked) -> None:
    """Refuse what cannot work, in one line and before anything is trained."""
    task, chain, federation, settings = asked.task, asked.chain, asked.federation, asked.settings
    chain.check_message(federation.message)
    if not asked.attacks:
        raise FedveilError("an audit needs an attack: see `fedveil list attacks`")
    if not settings.rounds or len(set(settings.rounds)) < len(settings.rounds):
        raise FedveilError(
            f"the attacked rounds must be named, each once (got {list(settings.rounds)}): 1, for example"
        )
    if settings.candidates < 2:
        raise FedveilError("an image cannot be told from others with 1 candidate: use at least 2 (candidates)")
    early, last = min(settings.rounds), max(settings.rounds)
    if chain.defenses and early <= federation.warmup_rounds:
        raise FedveilError(
            f"round {early} is a warm-up round, without the defense: attack rounds after {federation.warmup_rounds}"
        )
    if last > 1 and not asked.train:
        raise FedveilError(f"round {last} cannot be attacked without training: attack round 1, or train")
    if asked.train and last > federation.rounds:
        raise FedveilError(f"round {last} cannot be attacked: the federation trains {federation.rounds} rounds")
    if settings.attackers == "adaptive" and chain.defenses and not states_any_knowledge(chain):
        raise FedveilError(
            f"{chain} does not say what an attacker who knows it would do: give its class `knowledge`, or attack with "
            "attackers='naive'"
        )
    for each in asked.attacks:
        labels = _choices(each).labels
        if labels == "idlg" and settings.batch_size != 1:
            raise FedveilError(f"{each.name} reads the label of a single example: use a batch of 1 (batch_size)")
        if labels == "optimized" and task.classes is None:
            raise FedveilError(f"{each.name} optimizes labels, but the model's output is not one score per class")
    if task.labels is not None:
        raise FedveilError("an audit needs one class per image; this task has several labels per image (train works)")
    if settings.source == "clients":
        _check_victims(task, settings)
    if settings.source == "test" and chain.composes:
        raise FedveilError(f"{chain} composes batches from a client's own data: attack with source 'clients'")
    if settings.source == "test" and settings.victims * settings.batch_size >= len(task.test):
        raise FedveilError(
            f"{settings.victims} victims with {settings.batch_size} examples leave no test examples to tell them from: "
            f"there are {len(task.test)}"
        )
    modality("pictures").check(task, settings.tools)


def _declared(thing: object) -> bool:
    return is_dataclass(thing)


def _choices(attack: Attack) -> Matching:
    """The choices of an attack, which may be a stranger's class."""
    kind: type[Attack] = type(attack)
    if not _declared(attack):
        raise FedveilError(f"the class {kind.__name__} is not declared: put @declared above it")
    if kind.choices is Attack.choices:
        raise FedveilError(f"{kind.__name__} does not define `choices`, which says how it attacks")
    try:
        choices: object = attack.choices()
    except Exception as error:  # whatever a stranger's code raises is the reason
        raise FedveilError(f"{kind.__name__}.choices fails: {type(error).__name__}: {error!s:.200}") from None
    if not isinstance(choices, Matching):
        raise FedveilError(f"{kind.__name__}.choices must return a `Matching`, not {choices!r:.80}")
    wrong = _wrong_choice(choices)
    if wrong:
        raise FedveilError(f"{kind.__name__}.choices: {wrong}")
    return choices


def _wrong_choice(choices: Matching) -> str | None:
    """What the matching engine cannot do of these choices, in one line."""
    for name, kind in get_type_hints(Matching).items():
        value = getattr(choices, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            return f"{name} must be one of {', '.join(get_args(kind))} (got {value!r:.80})"
    for name in ("steps", "restarts"):
        value = getattr(choices, name)
        if type(value) is not int or value < 1:
            return f"{name} must be a whole number of at least 1 (got {value!r:.80})"
    return None


def _check_victims(task: Task, settings: AuditSettings) -> None:
    """Victims are dealt out over the clients in turn: each must have enough examples of its own."""
    for client, places in enumerate(task.clients):
        batches = len(range(client, settings.victims, len(task.clients)))
        if batches * settings.batch_size > len(places):
            enough = min(len(each) // settings.batch_size for each in task.clients) * len(task.clients)
            raise FedveilError(
                f"client {client} has {len(places)} examples, too few for {batches} attacked batches of "
                f"{settings.batch_size}: use at most {enough} victims, or smaller batches"
                if enough
                else f"client {client} has {len(places)} examples, too few for one attacked batch of "
                f"{settings.batch_size}: use smaller batches"
            )
