"""Scenes for the link test: real updates of small tasks, with candidates of the original's class."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from fedveil.attacks.replay import shared_updates
from fedveil.attacks.scene import Candidates, Public, Scene
from fedveil.clients.engine import Engine
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.federation.plan import Plan
from fedveil.federation.probe import Victims, probe
from fedveil.federation.settings import FederationSettings
from fedveil.federation.steps import Prepared
from fedveil.leakage.distractors import choose
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout
from fedveil.tasks.task import Task, task
from fedveil.tree import Tree

MLP = "mlp:hidden=[16],activation=sigmoid"
FEDSGD = FederationSettings()
WEIGHTS = FederationSettings(protocol="fedavg")
DELTA = FederationSettings(protocol="fedavg", upload="delta")


@cache
def digits(model: str | nn.Module = MLP) -> Task:
    return task("digits", model=model, seed=0)


def scene_of(
    of: Task,
    spec: str | None,
    settings: FederationSettings = FEDSGD,
    *,
    victims: int = 8,
    batch: int = 1,
    among: int = 20,
) -> tuple[Scene, Tensor]:
    """What an informed attacker has of some clients, and where among the candidates each original stands."""
    params = {name: p.detach() for name, p in of.model.named_parameters() if p.requires_grad}
    engine = Engine(of.model, of.loss, backend="loop", perturb=of.perturb)
    prepared = Prepared(Plan(of, Chain.of(spec), settings), engine)
    got = probe(prepared, params, dict(of.model.named_buffers()), 1, Victims(victims, batch))
    place = (torch.arange(victims) * 7 + 3) % among
    inputs, labels = _mixed(of, got.truth.inputs, got.truth.targets, place, among)
    public = Public(of.model, of.loss, Layout("pictures", of.shape), of.classes)
    streams = Streams.seeded(11, range(victims), "attack")
    return Scene(public, got.defended, streams, Chain.of(spec), candidates=Candidates(inputs, labels)), place


def _mixed(of: Task, inputs: Tensor, labels: Tensor, place: Tensor, among: int) -> tuple[Tensor, Tensor]:
    """(V, N, B, ...): the original at its place among batches of held-out pictures of the same classes."""
    pool, pool_labels = of.test.batch(range(len(of.test)))
    chosen = choose(inputs.flatten(0, 1), labels.flatten(), pool, pool_labels, count=among)
    index = chosen.reshape(*labels.shape, among - 1).transpose(1, 2)
    rows, marks = [], []
    for v, at in enumerate(place.tolist()):
        others, their = pool[index[v]], pool_labels[index[v]]
        rows.append(torch.cat([others[:at], inputs[v : v + 1], others[at:]]))
        marks.append(torch.cat([their[:at], labels[v : v + 1], their[at:]]))
    return torch.stack(rows), torch.stack(marks)


def naive(scene: Scene) -> Scene:
    """The same for an attacker who knows nothing of the defense."""
    return replace(scene, chain=Chain())


def noise_instead(scene: Scene) -> Scene:
    """Noise of the same length in place of every update."""
    like = scene.updates.message
    noise = like.map(Streams.seeded(9, range(scene.count)).normal_like)
    return replace(scene, updates=replace(scene.updates, message=noise * (like.norm() / noise.norm())))


class Dot(nn.Module):
    """A model whose gradient is the mean of its inputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.w


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean()


def scene_at_choice(chain: Chain, acting: Chain, rows: Tensor, victims: int, kind: str) -> tuple[Scene, Tensor]:
    """Victims whose gradients are drawn from the same N candidates (N, B, d); `acting` protects in place of `chain`."""
    model = Dot(rows.shape[-1])
    public = Public(model, mean, Layout("vectors", tuple(rows.shape[2:])))
    before = Tree.expand({"w": model.w.detach()}, victims)
    like = Updates(kind, before, before, Tree({}), (1.0,), (rows.shape[1],))  # type: ignore[arg-type]
    place = Streams.seeded(5, [0]).integers(len(rows), victims)[0]
    marks = torch.zeros(victims, len(rows), rows.shape[1], dtype=torch.int64)
    own = Streams.seeded(3, range(victims), "victims")
    message = shared_updates(public, like.rows([0]), acting, rows[place], marks[:, 0], own)
    offered = Candidates(rows.expand(victims, *rows.shape), marks)
    streams = Streams.seeded(4, range(victims), "attack")
    return Scene(public, replace(like, message=message), streams, chain, candidates=offered), place
