"""Labs and scenes on digits for attacks that learn."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from fedveil.attacks.lab import Lab
from fedveil.attacks.practice import Batches, Practice
from fedveil.attacks.scene import Public, Scene
from fedveil.defenses.chain import Chain
from fedveil.defenses.updates import Updates
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout
from fedveil.tree import Tree

from .small import task_of


def lab_of(model="lenet", batch=1, chain=None, **options):
    """A lab whose auxiliary data are the training digits."""
    made = task_of(model)
    weights = {name: weight.detach() for name, weight in made.model.named_parameters()}
    before, buffers = Tree.expand(weights, 1), Tree.expand(dict(made.model.named_buffers()), 1)
    like = Updates("gradient", before, before.map(torch.zeros_like), buffers, (0.1,), (batch,))
    public = Public(made.model, F.cross_entropy, Layout("pictures", (1, 8, 8), made.normalization.box()), 10)
    like = replace(like, **options)
    return Lab(public, like, made.train, Streams.seeded(3, [0], "lab"), chain or Chain())


def scene_of(lab, victims=8):
    """The first test digits, and the scene of an attacker who sees what is sent of them under the lab's defense."""
    size = lab.model.examples
    inputs, labels = task_of("lenet").test.batch(range(victims * size))
    batches = Batches(inputs.reshape(victims, size, 1, 8, 8), labels.reshape(victims, size))
    message = Practice(lab, size, batches).sent(batches, Streams.seeded(5, range(victims)))
    updates = replace(
        lab.model,
        before=Tree.expand(lab.model.before.row(0), victims),
        message=message,
        buffers=Tree.expand(lab.model.buffers.row(0), victims),
    )
    scene = Scene(lab.public, updates, Streams.seeded(1, range(victims)), lab.chain, batches.labels)
    return batches.inputs, scene


def noise_in_place(scene):
    """The scene in which noise of each update's norm was sent instead."""
    message = scene.updates.message
    noise = message.map(Streams.seeded(9, range(scene.count)).normal_like)
    return replace(scene, updates=replace(scene.updates, message=noise * (message.norm() / noise.norm())))
