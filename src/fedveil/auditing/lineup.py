"""Which attacks an audit runs: those that were named, or those of a suite that can work here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from fedveil.attacks.base import Attack
from fedveil.attacks.scene import Candidates, Scene, Suspects
from fedveil.auditing.attacking import Shown, scene_of
from fedveil.auditing.case import Case
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.requirements import check_attack
from fedveil.auditing.suites import suite_named
from fedveil.defenses.updates import Updates, with_gradient
from fedveil.errors import FedveilError
from fedveil.registry import attacks
from fedveil.streams import Streams
from fedveil.tasks.task import Task
from fedveil.tree import Tree

NO_AUXILIARY = "there are no auxiliary data for it to learn from"
NO_MODEL = "it looks at the model that training comes to, and none is trained"


@dataclass(frozen=True)
class Lineup:
    """The attacks in their order, and why others are left out."""

    attacks: tuple[Attack, ...]
    left_out: dict[str, str]  # by name

    @classmethod
    def of(cls, experiment: Experiment, task: Task, case: Case, *, learns: bool) -> Self:
        """The attacks of an experiment. A named one that cannot work is refused, one of a suite is left out.

        learns: there are auxiliary data.
        """
        chosen, left_out = [], dict(_unknown(experiment))
        for each in experiment.attacks:
            if experiment.suite is not None and each.modalities and case.modality.name not in each.modalities:
                continue  # a suite is for all kinds of data, and this one is for another
            try:
                check_attack(each, task, case.settings, case.modality)
                each.check(stand_in(case, experiment, each))
            except FedveilError as error:
                if experiment.suite is None:
                    raise
                left_out[each.name] = str(error)
                continue
            if "auxiliary" in each.needs and not learns:
                left_out[each.name] = NO_AUXILIARY
            elif each.looks_at == "model" and not experiment.trains:
                left_out[each.name] = NO_MODEL
            else:
                chosen.append(each)
        if not chosen:
            left_out = left_out or {experiment.suite or "": f"none of it attacks {case.modality.name}"}
            raise FedveilError("no attack can be run: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
        return cls(tuple(chosen), left_out)


def _unknown(experiment: Experiment) -> Iterator[tuple[str, str]]:
    for spec in suite_named(experiment.suite).attacks if experiment.suite else ():
        name = spec.partition(":")[0]
        if name not in attacks.entries():
            yield name, "no attack of this name is registered"


def stand_in(case: Case, experiment: Experiment, attack: Attack) -> Scene:
    """A scene of the audit's form before there is any update: attacks refuse by it, and tell how long they will take.

    In place of updates there is noise, equal for all victims, and in place of labels and candidates there are zeros.
    """
    model, settings, federation = case.public.model, experiment.audit, experiment.federation
    count, size = settings.victims, settings.batch_size
    sizes, epochs = [size], 1
    if federation.protocol == "fedavg":
        step, epochs = federation.batch_size, federation.local_epochs
        sizes = [min(step, size - start) for start in range(0, size, step)] * epochs
    before = Tree.expand({name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, 1)
    one = Updates(
        kind=federation.message,
        before=before,
        message=before,
        buffers=Tree.expand({name: b.detach() for name, b in model.named_buffers()}, 1),
        lr=(federation.lr,) * len(sizes),
        batch_sizes=tuple(sizes),
        local_epochs=epochs,
    )
    one = with_gradient(one, before.map(Streams.seeded(experiment.seed, [0], "stand-in").normal_like))
    updates = replace(
        one,
        before=Tree.expand(one.before.row(0), count),
        message=Tree.expand(one.message.row(0), count),
        buffers=Tree.expand(one.buffers.row(0), count),
    )
    form = case.public.target
    labels = form.zeros().expand(count, settings.candidates, size, *form.shape)
    nothing = next(iter(before.values())).new_zeros(())
    # Zeros serve as sentences, too: token 0 at every place.
    candidates = Candidates(nothing.expand(count, settings.candidates, size, *case.public.layout.shape), labels)
    others = settings.nonmembers
    suspects = Suspects(nothing.expand(others, *case.public.layout.shape), form.zeros().expand(others, *form.shape))
    scene = scene_of(case, attack, Shown(updates, labels[:, 0], candidates, suspects=suspects))
    return replace(scene, chain=experiment.chain)
