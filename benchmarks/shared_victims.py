"""Victims that both sides of a comparison read from one file, and our side of it in warm worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.attack import plain_attack
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.matcher import Matcher
from fedveil.attacks.notes import Counter
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import Workbench
from fedveil.attacks.without_dropout import without_dropout
from fedveil.clients.engine import Engine
from fedveil.defenses.base import trusting
from fedveil.registry import datasets, models
from fedveil.streams import Streams
from fedveil.tasks.normalization import Normalization
from fedveil.tree import Tree

Workers = list[ProcessPoolExecutor]  # of one process each, so that every one of them can be kept warm


def write_victims(path: Path, model_name: str, peer_model: str, count: int) -> None:
    """The undefended gradients of the first CIFAR-10 test images, one each, at an untrained model; and a start each."""
    data = datasets.build("cifar10").load()
    pixels = torch.as_tensor(data.test.images[:count]) / 255
    images, labels = data.normalization.normalize(pixels), torch.as_tensor(data.test.labels[:count]).long()
    torch.manual_seed(0)
    model = models.parse(model_name).build(tuple(images.shape[1:]), data.classes)
    params = Tree.expand({name: p.detach() for name, p in model.named_parameters()}, count)
    streams = Streams.seeded(0, range(count))
    engine = Engine(model, functional.cross_entropy, backend="loop")
    gradients = engine.gradient(params, Tree({}), images.unsqueeze(1), labels.unsqueeze(1), streams).update
    arrays = {
        "our_model": np.array(model_name),
        "model": np.array(peer_model),
        "images": images,
        "labels": labels,
        "mean": np.array(data.normalization.mean),
        "std": np.array(data.normalization.std),
        "start": streams.fold("start", 0).normal(1, *images.shape[1:])[:, 0],  # what a Matcher starts from
    }
    for place, name in enumerate(params):
        arrays |= {f"weight_{place}": params[name][0], f"gradient_{place}": gradients[name]}
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})


@cache
def read_victims(path: Path) -> tuple[Problem, Tensor, Normalization]:
    """Our attack's view of the file, the original images, and how they were normalized."""
    arrays = dict(np.load(path))
    images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    normalization = Normalization(tuple(arrays["mean"].tolist()), tuple(arrays["std"].tolist()))
    model = models.parse(str(arrays["our_model"])).build(tuple(images.shape[1:]), 10)
    names = [name for name, _ in model.named_parameters()]
    weights = {name: torch.from_numpy(arrays[f"weight_{place}"]) for place, name in enumerate(names)}
    model.load_state_dict(weights)
    target = Tree({name: torch.from_numpy(arrays[f"gradient_{place}"]) for place, name in enumerate(names)})
    problem = Problem(
        model=without_dropout(model),
        loss=functional.cross_entropy,
        params=Tree.expand(weights, len(images)),
        buffers=Tree({}),
        target=target,
        weight=trusting(target).weight,
        shape=tuple(images.shape[1:]),
        batch_size=1,
        streams=Streams.seeded(0, range(len(images))),
        classes=10,
        labels=labels.unsqueeze(1),
        box=normalization.box(),
    )
    return problem, images, normalization


# ---- in a worker process ----------------------------------------------------------------------------------

_matchers: dict[tuple[Path, int, float], Matcher] = {}


def compiled(path: Path, victims: Sequence[int], steps: int, total_variation: float) -> np.ndarray:
    """Our attack on some victims; the second call for as many is warm."""
    problem = read_victims(path)[0].rows(list(victims))
    # Nothing but what breaching does: no L-BFGS behind the steps, and all of them.
    attack = InvertingGradients(steps=steps, total_variation=total_variation, restarts=1, polish=0, settle=False)
    key = (path, len(victims), total_variation)
    if key not in _matchers:
        _matchers[key] = Matcher(problem, attack.recipe(), Workbench(backend="compiled"))
    _matchers[key].recipe = attack.recipe()
    return _matchers[key].run(problem, 0, Counter(None, 1)).inputs[:, 0].numpy()


def plain(path: Path, victims: Sequence[int], steps: int) -> None:
    """The plain loop on some victims, one after another."""
    problem = read_victims(path)[0]
    assert problem.labels is not None
    for victim in victims:
        plain_attack(
            problem.model, list(problem.target.row(victim).values()), problem.labels[victim], problem.shape, steps
        )


# ---- starting and calling them ----------------------------------------------------------------------------


@contextlib.contextmanager
def our_workers(count: int, path: Path) -> Iterator[Workers]:
    """Processes with one thread each that have read the victims."""
    with contextlib.ExitStack() as stack:
        workers = []
        for _ in range(count):
            pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
            workers.append(stack.enter_context(pool))
        for read in [worker.submit(read_victims, path) for worker in workers]:
            read.result()
        yield workers


def ours_whole_machine(
    workers: Workers, path: Path, victims: Sequence[int], steps: int, total_variation: float
) -> Tensor:
    """Our attack, the victims shared out between the workers."""
    shares = [share.tolist() for share in np.array_split(np.array(victims), len(workers))]
    running = [
        w.submit(compiled, path, share, steps, total_variation) for w, share in zip(workers, shares, strict=True)
    ]
    return torch.from_numpy(np.concatenate([each.result() for each in running]))
