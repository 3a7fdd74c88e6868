"""What an audit needs: whatever is missing is refused before any long work starts."""

from __future__ import annotations

from fedveil.attacks.base import Attack
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.settings import NONE, AuditSettings
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.leakage.modality import Modality
from fedveil.tasks.task import Task


def check_experiment(experiment: Experiment, task: Task, modality: Modality) -> None:
    """Refuse what cannot work, in one line and before anything is trained."""
    chain, federation, settings = experiment.chain, experiment.federation, experiment.audit
    chain.check_message(federation.message)
    _check_rounds(experiment)
    check_settings(settings, chain)
    for each in experiment.attack:  # those of a suite are left out where they cannot work: see `lineup`
        check_attack(each, task, settings, modality)
        if "auxiliary" in each.needs and settings.auxiliary == NONE and experiment.own_auxiliary is None:
            raise FedveilError(f"{each.name} learns from auxiliary data, and there are none: see `auxiliary`")
    if settings.source == "clients":
        _check_victims(task, settings)
    if settings.source == "test" and chain.composes:
        raise FedveilError(f"{chain} composes batches from a client's own data: attack with source 'clients'")
    if settings.source == "test" and settings.victims * settings.batch_size >= len(task.test):
        raise FedveilError(
            f"{settings.victims} victims with {settings.batch_size} examples leave no test examples to tell them from: "
            f"there are {len(task.test)}"
        )
    modality.check(task, settings.tools)


def check_settings(settings: AuditSettings, chain: Chain) -> None:
    """Refuse settings under which nothing could be judged, whoever made the updates."""
    if settings.candidates < 2:
        raise FedveilError("nothing can be told from others with 1 candidate: use at least 2 (candidates)")
    if settings.attackers == "adaptive" and chain.defenses and not chain.states_knowledge:
        raise FedveilError(
            f"{chain} does not say what an attacker who knows it would do: give its class `knowledge`, or attack with "
            "attackers='naive'"
        )


def _check_rounds(experiment: Experiment) -> None:
    federation, rounds = experiment.federation, experiment.audit.rounds
    if not rounds or len(set(rounds)) < len(rounds):
        raise FedveilError(f"the attacked rounds must be named, each once (got {list(rounds)}): 1, for example")
    early, last = min(rounds), max(rounds)
    if experiment.defense and early <= federation.warmup_rounds:
        raise FedveilError(
            f"round {early} is a warm-up round, without the defense: attack rounds after {federation.warmup_rounds}"
        )
    if last > 1 and not experiment.trains:
        raise FedveilError(f"round {last} cannot be attacked without training: attack round 1, or train")
    if experiment.trains and last > federation.rounds:
        raise FedveilError(f"round {last} cannot be attacked: the federation trains {federation.rounds} rounds")


def check_attack(attack: Attack, task: Task, settings: AuditSettings, modality: Modality) -> None:
    """Refuse an attack that this audit has not what it needs for."""
    needs = attack.needs
    if attack.modalities and modality.name not in attack.modalities:
        raise FedveilError(f"{attack.name} attacks {' or '.join(attack.modalities)}, not {modality.name}")
    if "batch of one" in needs and settings.batch_size != 1:
        raise FedveilError(f"{attack.name} reads the label of a single example: use a batch of 1 (batch_size)")
    if "classes" in needs and task.classes is None and task.target.kind == "class":
        raise FedveilError(f"{attack.name} optimizes labels, but the model's output is not one score per class")
    if task.target.kind != "class":
        _check_targets(attack, task, settings)


def _check_targets(attack: Attack, task: Task, settings: AuditSettings) -> None:
    """Several labels and numbers: some attacks think in classes, and targets are read off single examples only."""
    what = "several labels" if task.target.kind == "labels" else "numbers to predict"
    if "auxiliary" in attack.needs or attack.brings:
        raise FedveilError(f"{attack.name} learns from examples of one class each, and here each has {what}")
    if attack.labels_from == "recovered" and settings.batch_size != 1:
        raise FedveilError(
            f"{attack.name} cannot read {what} off the update of several examples: use a batch of 1 (batch_size), or "
            "labels 'known' or 'optimized'"
        )


def _check_victims(task: Task, settings: AuditSettings) -> None:
    """Victims are dealt out over the clients in turn: each must have enough examples of its own."""
    for client, indices in enumerate(task.clients):
        batches = len(range(client, settings.victims, len(task.clients)))
        if batches * settings.batch_size > len(indices):
            enough = min(len(each) // settings.batch_size for each in task.clients) * len(task.clients)
            raise FedveilError(
                f"client {client} has {len(indices)} examples, too few for {batches} attacked batches of "
                f"{settings.batch_size}: use at most {enough} victims, or smaller batches"
                if enough
                else f"client {client} has {len(indices)} examples, too few for one attacked batch of "
                f"{settings.batch_size}: use smaller batches"
            )
