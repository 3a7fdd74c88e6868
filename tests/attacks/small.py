"""Small problems for the attack tests: real digits, small models, plain gradients."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn import functional as F

from fedveil.attacks import matcher
from fedveil.attacks.candidate import Pixels
from fedveil.attacks.optimizers import LBFGS, Adam
from fedveil.attacks.priors import MeanSquare, TotalVariation
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Phase, Recipe
from fedveil.attacks.scene import Public, Scene, Workbench
from fedveil.clients.engine import Engine
from fedveil.defenses.updates import Updates
from fedveil.leakage.metrics import psnr
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout
from fedveil.tasks.task import task
from fedveil.tree import Tree

SMOOTH = "mlp:hidden=[32],activation=sigmoid"


@dataclass(frozen=True)
class Choices:
    """A recipe as flat fields, of which a test changes one or two."""

    cost: str = "cosine"
    steps: int = 1600
    optimizer: str = "adam"
    lr: float = 0.1
    signed: bool = True
    alternate: bool = False
    decay: bool = True
    boxed: bool = True
    total_variation: float = 0.0
    mean_square: float = 0.0
    labels: str = "known"
    start: str = "normal"
    restarts: int = 1

    def recipe(self):
        tries = []
        for attempt in range(self.restarts):
            signed = self.signed != (self.alternate and attempt % 2 == 1)
            adam = Adam(self.lr, signed, self.decay)
            tries.append((Phase(self.steps, LBFGS(self.lr) if self.optimizer == "lbfgs" else adam),))
        priors = [TotalVariation(self.total_variation)] if self.total_variation else []
        priors += [MeanSquare(self.mean_square)] if self.mean_square else []
        return Recipe(
            match=self.cost,
            candidate=Pixels(self.start, self.boxed),
            priors=tuple(priors),
            tries=tuple(tries),
            labels=self.labels,
        )


def matcher_of(problem, choices, backend):
    return matcher.Matcher(problem, choices.recipe(), Workbench(backend=backend))


def run(attack, problem, backend="auto"):
    """A matching attack on a problem that was made by hand."""
    return matcher.match(problem, attack.recipe(), Workbench(backend=backend))


def scene_of(problem, **options):
    """The scene of an attacker who sees the problem's target as a gradient."""
    updates = Updates("gradient", problem.params, problem.target, problem.buffers, (0.1,), (problem.batch_size,))
    layout = Layout("pictures", problem.shape, problem.box)
    public = Public(problem.model, problem.loss, layout, problem.classes)
    return Scene(public, updates, problem.streams, labels=problem.labels, **options)


def on_the_way(found):
    """The iterates as one tensor."""
    return torch.stack(list(found.iterates))


def match(problem, choices, *, backend="auto", chunk=None, progress=None):
    return matcher.match(problem, choices.recipe(), Workbench(backend=backend, chunk=chunk, report=progress))


@cache
def task_of(model, data="digits", root=None):
    return task(data, model=model, seed=0, data_root=root)


def ones(tree):
    return tree.map(lambda tensor: tensor.new_ones(()).expand_as(tensor))


def problem_of(model, inputs, targets, *, box=None, classes=10, seed=1, same_weights=True):
    """Victims with the given batches (V, B, ...) and the gradient of each at the model's weights."""
    count = len(targets)
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, count)
    buffers = Tree.expand(dict(model.named_buffers()), count)
    if not same_weights:
        torch.manual_seed(5)
        params = params.map(lambda p: p + 0.05 * torch.randn_like(p))
    engine = Engine(model, F.cross_entropy, backend="loop")
    update = engine.gradient(params, buffers, inputs, targets, Streams.seeded(0, range(count))).update
    return Problem(
        model=model,
        loss=F.cross_entropy,
        params=params,
        buffers=buffers,
        target=update,
        weight=ones(update),
        shape=tuple(inputs.shape[2:]),
        batch_size=targets.shape[1],
        streams=Streams.seeded(seed, range(count)),
        classes=classes,
        labels=targets,
        box=box,
    )


def digits(model="lenet", victims=4, batch=1, **options):
    """(images (V, B, 1, 8, 8), labels (V, B), the problem) of the first test digits."""
    made = task_of(model)
    inputs, targets = made.test.batch(range(victims * batch))
    inputs, targets = inputs.reshape(victims, batch, *inputs.shape[1:]), targets.reshape(victims, batch)
    return inputs, targets, problem_of(made.model, inputs, targets, box=made.normalization.box(), **options)


def random_problem(model, shape, victims=5, batch=2, classes=3, **options):
    torch.manual_seed(7)
    inputs, targets = torch.randn(victims, batch, *shape), torch.randint(0, classes, (victims, batch))
    return problem_of(model, inputs, targets, classes=classes, **options)


def as_double(problem):
    """The same in double precision, where equality can be asked for tightly."""
    return replace(
        problem,
        model=problem.model.double(),
        params=problem.params.to(torch.float64),
        buffers=problem.buffers.to(torch.float64),
        target=problem.target.to(torch.float64),
        weight=problem.weight.to(torch.float64),
        box=None if problem.box is None else tuple(bound.double() for bound in problem.box),
    )


def noise_target(problem):
    """Noise of the target's norm in its place: what the attack makes of nothing."""
    noise = problem.target.map(Streams.seeded(9, range(problem.count)).normal_like)
    return replace(problem, target=noise * (problem.target.norm() / noise.norm()))


def decibels(found, images, std):
    """PSNR of every image of every victim, batches of one."""
    return psnr(found.inputs.flatten(0, 1), images.flatten(0, 1), std)


def copies(problem):
    """Clones of all that a problem holds, to see later that nothing was changed."""
    trees = (problem.params, problem.buffers, problem.target, problem.weight)
    kept = [tensor.clone() for tree in trees for tensor in tree.values()]
    return kept + [tensor.clone() for tensor in (problem.labels, *problem.box) if tensor is not None]
