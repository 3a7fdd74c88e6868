"""A reference classifier: a small network trained on the task's own images, to compare pictures by what they show.

The papers use an ImageNet VGG-16 for their KL divergence and feature distances. That says little about 28×28 pictures,
and needs a download; this one is ours, and its numbers are not comparable with those of the papers. It is the
auditor's tool: no attack sees it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.errors import FedveilError
from fedveil.tasks.cache import cache_folder
from fedveil.tasks.examples import Examples
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tasks.randomness import derived_key, generator
from fedveil.tasks.task import Task
from fedveil.tensors import read_safetensors, write_safetensors

log = logging.getLogger("fedveil")

VERSION = 1  # of the recipe below; another one must not read this one's files
EXAMPLES = 5000  # the most to train on
TEST_EXAMPLES = 2000  # the most to measure its accuracy on
STEPS = 500  # about six passes over 5,000 examples, more over fewer: the time is the same for all
BATCH = 64
RATE = 2e-3
LARGEST = 32  # pixels: larger pictures are made smaller first
TOGETHER = 512  # pictures looked at in one go


class SmallNet(nn.Module):
    """Two convolutions with pooling, a layer of 64 features, and one score per class."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.size = min(height, LARGEST), min(width, LARGEST)
        pooled = [-(-side // 4) for side in self.size]  # each pooling rounds up
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(32 * pooled[0] * pooled[1], 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, classes)

    def shrink(self, images: Tensor) -> Tensor:
        """Pictures of at most 32 pixels a side; small ones as they are. In this network's own floating type."""
        images = images.to(self.head.weight)
        fits = tuple(images.shape[-2:]) == self.size
        return images if fits else functional.adaptive_avg_pool2d(images, self.size)

    def features(self, images: Tensor) -> Tensor:
        """What the last layer sees of the images."""
        found: Tensor = self.body(self.shrink(images))
        return found

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images))
        return scores


@dataclass(frozen=True, eq=False, repr=False)
class Reference:
    """The trained classifier. It takes normalized images, as the task's model does."""

    model: SmallNet
    accuracy: float  # on test examples of the task, so that a reader can tell what its judgment is worth
    examples: int  # it was trained on

    @property
    def content(self) -> str:
        """A hash of its weights."""
        return fingerprint(sorted(self.model.state_dict().items()))

    def features(self, images: Tensor) -> Tensor:
        """The 64 features before the last layer: (N, 64)."""
        return self._seen(images)[0]

    def logits(self, images: Tensor) -> Tensor:
        """One score per class: (N, classes)."""
        return self._seen(images)[1]

    @torch.no_grad()
    def _seen(self, images: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.split(images.detach().to("cpu", torch.float32), TOGETHER)
        features = torch.cat([self.model.features(part) for part in parts])
        return features, self.model.head(features)

    def __repr__(self) -> str:
        return f"Reference(accuracy={self.accuracy:.3f}, examples={self.examples})"


def reference(task: Task, *, seed: int = 0, sketched: bool = False) -> Reference:
    """The reference classifier of a task: from the cache, or else trained, which takes seconds, and kept there.

    sketched: for a forecast: one that is not in the cache is not trained.

    It depends on the training examples, the number of classes and the seed alone; on one machine and one number of
    threads to the last bit. At most 5,000 examples are used, drawn by the seed.
    """
    if task.classes is None or len(task.shape) != 3 or not isinstance(task.train.batch([0])[0], Tensor):
        raise FedveilError("a reference classifier needs images (channels, height, width) with one class each")
    chosen = generator(seed, "reference").permutation(len(task.train))[:EXAMPLES]
    channels, height, width = task.shape
    model = _fresh((channels, height, width), task.classes, seed)
    images, labels = _read(task.train.subset(torch.from_numpy(chosen)), model)
    content = fingerprint([("images", images), ("labels", labels), ("classes", torch.tensor([task.classes, seed]))])
    path = cache_folder() / "reference" / f"{VERSION}-{content[:32]}.safetensors"
    # The accuracy is not kept: which examples are held out is not part of the key.
    there = _load(model, path)
    if sketched:
        return Reference(model.eval(), 0.0, len(labels))
    if not there:
        _train(model, images, labels, seed)
        _keep(model, path)
    held_out, expected = _read(task.test.subset(range(min(TEST_EXAMPLES, len(task.test)))), model)
    with torch.no_grad():
        accuracy = float((model(held_out).argmax(1) == expected).double().mean())
    log.info("reference classifier: accuracy %.3f, trained on %d examples", accuracy, len(labels))
    return Reference(model.eval(), accuracy, len(labels))


def _fresh(shape: tuple[int, int, int], classes: int, seed: int) -> SmallNet:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_key(seed, "reference model") % 2**64)
        return SmallNet(shape, classes)


def _train(model: SmallNet, images: Tensor, labels: Tensor, seed: int) -> None:
    """Adam with a rate that falls to zero along a cosine."""
    random = generator(seed, "reference order")
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    waiting = torch.empty(0, dtype=torch.int64)  # of the current pass
    with torch.enable_grad():
        for _ in range(STEPS):
            if not len(waiting):
                waiting = torch.from_numpy(random.permutation(len(labels)))
            batch, waiting = waiting[:BATCH], waiting[BATCH:]
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()


def _read(examples: Examples, model: SmallNet) -> tuple[Tensor, Tensor]:
    """The examples, made as small as the model does it: thousands of large pictures need not fit into memory."""
    parts = [model.shrink(images) for images, _ in examples.batches() if isinstance(images, Tensor)]
    return torch.cat(parts), examples.labels


def _load(model: SmallNet, path: Path) -> bool:
    """Whether the cache had the weights; a damaged file counts as none."""
    try:
        model.load_state_dict(read_safetensors(path)[1])
    except (OSError, safetensors.SafetensorError, RuntimeError):
        return False
    return True


def _keep(model: SmallNet, path: Path) -> None:
    recipe = {"steps": STEPS, "batch": BATCH, "rate": RATE}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(path, model.state_dict(), {"fedveil.reference": json.dumps(recipe)})
    except (OSError, FedveilError) as error:
        log.info("the reference classifier is not kept: %s", error)
