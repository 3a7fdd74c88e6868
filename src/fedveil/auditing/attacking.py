"""From what clients shared to reconstructions: one stack of victims for every attacker, floor and ceiling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedveil.attacks.base import Attack
from fedveil.attacks.problem import LocalSteps, Problem, Reconstruction
from fedveil.attacks.tracking import Progress
from fedveil.auditing.roles import Role
from fedveil.clients.engine import Backend, Loss
from fedveil.defenses.base import Defense, Facts
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.progress import part_of
from fedveil.streams import Streams
from fedveil.tasks.normalization import Normalization
from fedveil.tree import Tree, per_client
from fedveil.workers import Workers


@dataclass(frozen=True)
class Scene:
    """What an attacker knows of V observed updates, whoever they come from: a probe, a capture or a live run."""

    model: nn.Module
    loss: Loss
    params: Tree
    buffers: Tree
    shape: tuple[int, ...]
    batch_size: int
    classes: int | None
    normalization: Normalization
    facts: Facts
    streams: Streams
    labels: Tensor | None  # (V, B) where the attacker is told
    local: LocalSteps | None = None

    def problem(self, target: Tree, weight: Tree | None = None) -> Problem:
        """The matching problem for one attacker; all entries are trusted alike unless told otherwise."""
        return Problem(
            model=self.model,
            loss=self.loss,
            params=self.params,
            buffers=self.buffers,
            target=target,
            weight=weight if weight is not None else Defense().knowledge(target, self.facts).weight,
            shape=self.shape,
            batch_size=self.batch_size,
            streams=self.streams,
            classes=self.classes,
            labels=self.labels,
            box=self.normalization.box(),
            local=self.local,
        )


def problems_by_role(
    scene: Scene, chain: Chain, *, defended: Tree | None, undefended: Tree | None, attackers: str = "both"
) -> dict[Role, Problem]:
    """The problem of every attacker of a table. A row whose update is not at hand is left out.

    So is the attacker who knows the defense where no defense says what such a one would do: it would be the naive one
    under a greater name.
    """
    found: dict[Role, Problem] = {}
    if undefended is not None:
        found["ceiling"] = scene.problem(undefended)
    if defended is not None and chain.defenses:
        if attackers in ("both", "naive"):
            found["naive"] = scene.problem(defended)
        if attackers in ("both", "adaptive") and states_any_knowledge(chain):
            known = chain.knowledge(defended, replace(scene.facts, before=scene.params))
            informed = scene.problem(known.target, known.weight)
            found["adaptive"] = replace(informed, simulate=known.simulate, before=known.before)
    observed = undefended if undefended is not None else defended
    if observed is None:
        raise FedveilError("there is no update to attack")
    found["noise-floor"] = scene.problem(noise_like(observed, scene.streams.fold("floor")))
    return found


def states_any_knowledge(chain: Chain) -> bool:
    """Whether a defense of the chain says what an attacker who knows it would do."""
    return len(chain.without_knowledge) < len(chain.defenses)


def noise_like(update: Tree, streams: Streams) -> Tree:
    """Noise with each victim's norm: what is left of an update that says nothing."""
    noise = update.map(streams.normal_like)
    scale = update.norm() / noise.norm().clamp_min(1e-30)
    return noise.map(lambda tensor: tensor * per_client(scale, tensor))


def run_roles(
    attack: Attack,
    problems: dict[Role, Problem],
    *,
    backend: Backend = "auto",
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> dict[Role, Reconstruction]:
    """Attack all roles as one stack of victims, so that they share one compiled function."""
    alike = {role: problem for role, problem in problems.items() if not (problem.simulate or problem.before)}
    report: Progress = progress or (lambda done, total: None)
    count, done = sum(problem.count for problem in problems.values()), 0

    def run(problem: Problem) -> Reconstruction:
        nonlocal done
        part = part_of(report, done / count, (done + problem.count) / count)
        done += problem.count
        return attack.run(problem, backend=backend, progress=part, workers=workers)

    outcome = _run_together(run, alike)
    for role, problem in problems.items():  # replaying what the defense did makes another function
        if role not in alike:
            outcome[role] = run(problem)
    return {role: outcome[role] for role in problems}


def _run_together(
    run: Callable[[Problem], Reconstruction], problems: dict[Role, Problem]
) -> dict[Role, Reconstruction]:
    given = list(problems.values())
    first, total = given[0], sum(problem.count for problem in given)
    shared = all(problem.params.repeated or problem.count == 1 for problem in given)
    labels = None if first.labels is None else torch.cat([p.labels for p in given if p.labels is not None])
    stacked = replace(
        first,
        # One copy of the weights serves all where the victims share a model.
        params=Tree.expand(first.params.row(0), total) if shared else Tree.concat([p.params for p in given]),
        buffers=Tree.concat([p.buffers for p in given]),
        target=Tree.concat([p.target for p in given]),
        weight=Tree.concat([p.weight for p in given]),
        labels=labels,
        # Every role starts from the same candidates: what differs is the update alone.
        streams=first.streams.rows([row for problem in given for row in range(problem.count)]),
    )
    found = run(stacked)
    outcome, start = {}, 0
    for role, problem in problems.items():
        outcome[role] = found.rows(slice(start, start + problem.count))
        start += problem.count
    return outcome
