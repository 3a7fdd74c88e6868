"""How an attacker who knows the defense chooses among reconstructions without knowing the truth.

Those of equal priors are compared by how well they explain the update that was sent: the link test, with the attacker's
own reconstructions for candidates. Among strengths of a prior that would choose the weakest, which fits the defense's
noise best; there the strongest counts that leaves no more unexplained than the noise would (discrepancy principle).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.link import LinkTest
from fedveil.attacks.replay import Replay
from fedveil.attacks.scene import Candidates, Scene, Workbench
from fedveil.defenses.base import mean_tree
from fedveil.defenses.likelihood import Reading, reading, step_gradient
from fedveil.tasks.inputs import take
from fedveil.tree import Tree

DRAWS = 16  # updates that a reconstruction would have led to, beside which the one that was sent is held
STRANGE = -2.0  # standard deviations below their mean from which on the noise does not explain it


def explanations(scene: Scene, found: Sequence[Reconstruction]) -> Tensor:
    """How well each of N reconstructions explains every victim's update: shape (V, N). One that diverged does not."""
    inputs = torch.stack([each.inputs for each in found], 1)
    finite = torch.isfinite(inputs).flatten(2).all(2)
    given = Candidates(
        torch.nan_to_num(inputs, nan=0.0, posinf=0.0, neginf=0.0).to(scene.like),
        torch.stack([each.labels for each in found], 1),
    )
    bench = Workbench(backend=scene.bench.backend)
    scores = LinkTest().run(replace(scene, candidates=given, bench=bench)).scores
    return torch.where(finite.cpu(), torch.nan_to_num(scores, nan=-torch.inf), -torch.inf)


def judged_by_noise(scene: Scene) -> bool:
    """Whether the law of the defense's last random mechanism is known, so that what it explains can be told."""
    return reading(scene.chain, scene.updates).judge is not None


def plausible(scene: Scene, found: Reconstruction) -> Tensor:
    """Whether each victim's update is what the defense may have made of its reconstruction: shape (V,).

    The update is held beside some that the defense, with other random numbers, makes of the reconstruction: it must be
    about as likely as they are. Of several messages it is their mean, beside means of as many: in the sum of their log
    densities what the reconstruction misses would drown in how far the messages lie apart.
    """
    how = reading(scene.chain, scene.updates)
    finite = torch.isfinite(found.inputs).flatten(1).all(1).cpu()
    if how.judge is None or not bool(finite.any()):
        return torch.zeros_like(finite)
    facts = replace(scene.updates.facts, kind="gradient") if how.of_step else scene.updates.facts
    observed = step_gradient(scene.updates) if how.of_step else scene.updates.message
    made = _before_noise(scene, how, found)
    seen = how.judge.log_density(observed, made, facts)
    if seen is None:
        return torch.zeros_like(finite)
    others = []
    for draw in range(DRAWS):
        fresh = [scene.streams.fold("draw", draw, *(("view", view) if view else ())) for view in range(len(scene.seen))]
        again = [how.judge.resent(made, facts, streams) for streams in fresh]
        density = how.judge.log_density(again[0] if len(again) == 1 else mean_tree(again), made, facts)
        assert density is not None
        others.append(density)
    drawn = torch.stack(others)
    return finite & (seen >= drawn.mean(0) + STRANGE * drawn.std(0))


def _before_noise(scene: Scene, how: Reading, found: Reconstruction) -> Tree:
    """What every victim's reconstruction leads to, up to where the last random mechanism gets it."""
    inputs = torch.nan_to_num(found.inputs, nan=0.0, posinf=0.0, neginf=0.0).to(scene.like)
    given = scene.public.layout.inputs(inputs)
    replay = Replay(scene.public, scene.updates.rows([0]), (take(given, 0), found.labels[0]), scene.bench.backend)
    rows = []
    for victim in range(scene.count):
        own = replay.of(scene.updates.rows([victim]))
        streams = scene.streams.fold("link").rows([victim])
        one = slice(victim, victim + 1)
        data = how.replayed, take(given, one), found.labels[one], streams
        if how.bare or how.of_step:
            rows.append(own.gradients(*data, how.histories[0], bare=how.bare))
        else:
            rows.append(own.messages(*data, how.histories[0]))
    return Tree.concat(rows)
