"""Captured updates ready to be attacked: everything checked, nothing run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from fedveil.attacks.base import Attack
from fedveil.attacks.scene import Public, Workbench
from fedveil.auditing.auxiliary import Auxiliary, AuxiliarySource
from fedveil.auditing.candidates import HeldOut, Originals
from fedveil.auditing.capture_checks import (
    Attackable,
    CaptureSetting,
    check_captures,
    epochs_alike,
    examples_of,
)
from fedveil.auditing.capture_text import as_text, check_text, sentences_of, text_task
from fedveil.auditing.capture_truth import Data, OneTruth, originals_of, others_of, read_truths
from fedveil.auditing.case import Case
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.preflight import preflight
from fedveil.auditing.requirements import check_settings
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, stack
from fedveil.fields import field_names
from fedveil.leakage.modalities import modality
from fedveil.leakage.modality import Modality
from fedveil.leakage.pictures import Pictures
from fedveil.tasks.examples import ArrayExamples
from fedveil.tasks.task import Task
from fedveil.workers import Workers


@dataclass(frozen=True, eq=False)
class Asked:
    """What an attack on captures was given."""

    captures: list[Capture]
    experiment: Experiment  # attacks, settings, seed and backend; its task and federation do not count
    setting: CaptureSetting
    truth: OneTruth | Sequence[OneTruth] | None = None
    data: Data | None = None
    data_root: Path | None = None


@dataclass(frozen=True, eq=False)
class CaptureShop:
    """Captures that fit together, with all that they are attacked, scored and judged by."""

    captures: list[Capture]
    known: Attackable
    case: Case
    attacks: tuple[Attack, ...]
    skipped: dict[str, str]  # why an attack cannot be run, by its name
    originals: Originals | None  # where the truth is known
    others: Task | None  # what the originals are told from
    judges: list[str]  # a sentence on each network that compares examples
    held_out: HeldOut | None  # the same others, and the mean of them
    auxiliary: Auxiliary | None  # what attackers learn from

    @classmethod
    def open(cls, asked: Asked, store: Store, workers: Workers) -> Self:
        """Check and prepare all that can be, before anything is attacked."""
        text = text_task(asked.data, asked.setting, asked.captures, asked.data_root)
        if text is not None:
            asked = replace(asked, data=text, setting=as_text(asked.setting, text))
        captures, experiment, data = asked.captures, asked.experiment, asked.data
        truths = read_truths(asked.truth, len(captures))
        if text is not None:
            known = check_text(captures, asked.setting, text)
            originals = sentences_of(truths, captures, known, text) if truths else None
        else:
            known = check_captures(captures, _with_normalization(asked))
            originals = originals_of(truths, captures, known) if truths else None
        others = None if data is None else others_of(data, known, asked.setting.loss, asked.data_root)
        settings = _settings(experiment.audit, captures, known)
        kind, judges = _modality(known, others, settings, learns=isinstance(data, Task | str))
        held_out, auxiliary = _held_out(asked, settings, kind, others, originals)
        there = _There(originals is not None, others is not None, auxiliary is not None)
        attacks, skipped = _attacks(experiment.attacks, there)
        for attack in attacks:
            _check_attack(attack, settings, known, kind)
        case = Case(
            name=f"{known.model_name}, captured",
            public=_public(known, asked, kind, text),
            modality=kind,
            settings=settings,
            store=store,
            bench=Workbench(backend=experiment.backend, workers=workers),
            seed=experiment.seed,
        )
        return cls(captures, known, case, attacks, skipped, originals, others, judges, held_out, auxiliary)

    def warnings(self) -> list[str]:
        """What is probably wrong with the captures, or with what is said of them: see `preflight`."""
        found: dict[str, None] = {}
        # An update of text is not computed again.
        originals = self.originals if self.case.public.layout.text is None else None
        for number, capture in enumerate(self.captures):
            truth = None if originals is None else (originals.inputs[number], originals.labels[number])
            known = self.known
            lines = preflight(
                capture,
                known.model,
                self.case.public.loss,
                truth=truth,
                normalization=known.normalization,
                defense=known.chain,
            )
            found |= dict.fromkeys(lines)
        return list(found)

    @cached_property
    def updates(self) -> Updates:
        """The captures as one stack of victims."""
        return stack(self.captures, {name: buffer.detach() for name, buffer in self.known.model.named_buffers()})


def _public(known: Attackable, asked: Asked, kind: Modality, text: Task | None) -> Public:
    made = Public(known.model, asked.setting.loss, kind.layout(known.shape), known.classes)
    return made if text is None else replace(made, target=text.target)


def _with_normalization(asked: Asked) -> CaptureSetting:
    """Where neither the user nor the capture says how inputs were normalized, a task of the same kind of data does."""
    setting, data = asked.setting, asked.data
    stated = setting.normalization is not None or any(each.public.mean is not None for each in asked.captures)
    return replace(setting, normalization=data.normalization) if isinstance(data, Task) and not stated else setting


def _settings(given: AuditSettings, captures: Sequence[Capture], known: Attackable) -> AuditSettings:
    """The settings with what the captures say of themselves."""
    first, chain = captures[0], known.chain
    check_settings(given, chain)
    if given.views > 1:
        raise FedveilError(f"captures hold one message about each batch: views = {given.views} is for an audit")
    return replace(
        given,
        victims=len(captures),
        batch_size=examples_of(first),
        rounds=tuple(sorted({capture.round for capture in captures})),
        # An attack can repeat only epochs of the same examples; of others it matches the mean gradient.
        local_steps=given.local_steps if epochs_alike(first) else "pseudo-gradient",
        attackers=given.attackers if chain.defenses else "both",
    )


def _modality(
    known: Attackable, others: Task | None, settings: AuditSettings, *, learns: bool
) -> tuple[Modality, list[str]]:
    """The kind of data, with networks that compare examples where there are enough others to train them on."""
    if others is None:
        return Pictures(known.normalization), []
    if others.text is not None:
        made = modality("sentences")
        made.check(others, settings.tools)
        return made.equipped(others, settings.tools)
    kind, tools = modality("pictures"), settings.tools if learns else settings.tools | {"reference": "none"}
    kind.check(others, tools)
    return kind.equipped(others, tools)


def _held_out(
    asked: Asked, settings: AuditSettings, kind: Modality, others: Task | None, originals: Originals | None
) -> tuple[HeldOut | None, Auxiliary | None]:
    """The others, and what attackers learn from, if any of them learns."""
    if others is None:
        return None, None
    source = AuxiliarySource(settings, asked.experiment.own_auxiliary, asked.data_root)
    read = source.read(others)
    learns = any("auxiliary" in each.needs for each in asked.experiment.attacks)
    held_out = HeldOut.of(kind, others.train, others.test, gives=learns and source.held_out)
    if not learns:
        return held_out, None
    behind = (
        [] if originals is None else [ArrayExamples(originals.inputs.flatten(0, 1), originals.labels.flatten(0, 1))]
    )
    return held_out, source.chosen(read, held_out.given, others, [held_out.judged, *behind])


@dataclass(frozen=True)
class _There:
    """What there is beside the captures."""

    truth: bool
    others: bool
    auxiliary: bool


def _attacks(given: Sequence[Attack], there: _There) -> tuple[tuple[Attack, ...], dict[str, str]]:
    """The attacks that can be run, and why others cannot, by their names."""
    found, skipped = [], {}
    for attack in given:
        if "candidates" in attack.needs and not (there.truth and there.others):
            skipped[attack.name] = "it needs what was behind the updates (truth), and others of the same kind (data)"
        elif "auxiliary" in attack.needs and not there.auxiliary:
            skipped[attack.name] = "there are no auxiliary data for it to learn from (data)"
        else:
            found.append(attack if there.truth else without_known_labels(attack))
    if not found:
        raise FedveilError("; ".join(f"{name} cannot be run: {why}" for name, why in skipped.items()))
    return tuple(found), skipped


def without_known_labels(attack: Attack) -> Attack:
    """The attack as it is where nobody tells it the labels: it reads them off the update."""
    if "labels" not in attack.needs:
        return attack
    if "labels" in field_names(type(attack)):
        return replace(cast(Any, attack), labels="recovered")  # type: ignore[no-any-return]
    raise FedveilError(f"{attack.name} is told the labels: give what was behind the updates (truth)")


def _check_attack(attack: Attack, settings: AuditSettings, known: Attackable, kind: Modality) -> None:
    if attack.modalities and kind.name not in attack.modalities:
        raise FedveilError(f"{attack.name} attacks {' or '.join(attack.modalities)}, not {kind.name}")
    if "batch of one" in attack.needs and settings.batch_size != 1:
        raise FedveilError(
            f"{attack.name} reads the label of a single example, and this update is of {settings.batch_size}: use "
            "inverting-gradients with labels recovered"
        )
    if "classes" in attack.needs and known.classes is None:
        raise FedveilError(f"{attack.name} optimizes labels, but the model's output is not one score per class")
