"""What is learned, complete: a model, a loss, and the data of every client."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.errors import FedveilError
from fedveil.registry import datasets, models
from fedveil.tasks.check import Loss, check_fit, check_model
from fedveil.tasks.datasets.base import DataSet, LoadedData
from fedveil.tasks.datasets.text import LoadedText
from fedveil.tasks.examples import Examples
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tasks.holdings import Holdings
from fedveil.tasks.inputs import leaf, leaves
from fedveil.tasks.models.base import ModelSpec
from fedveil.tasks.models.transformer import TextModel, Transformer
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.own_data import read_own_data
from fedveil.tasks.partition import Partition, partitions
from fedveil.tasks.randomness import derived_key
from fedveil.tasks.splits import Parts, Split, read_split, splits
from fedveil.tasks.tokens import PERTURBED, LoadedTokens, next_token_loss, tokenized, without_tokens
from fedveil.tasks.vocabulary import vocabulary_of

logger = logging.getLogger(__name__)

Buffers = Literal["shared", "local", "recalibrated"]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Task:
    """A model, a loss and the clients' data: what a federation learns and an audit attacks.

    Bring your own::

        Task(model=my_module, data=my_dataset)
        Task(model=my_module, data=(images, labels), clients=10)
        Task(model=my_module, data=((x, y), (x_test, y_test)), loss=my_loss)

    or build one by name with `task("fashion-mnist", model="lenet")`. Everything is checked when it is made.

    model: any module; it is kept, not copied, and its weights are where training starts.
    data: a map-style torch `Dataset` of (input, label), a pair of arrays (inputs, targets), or a tuple (train, test)
        or (train, validation, test) of these. One set alone is divided by `split`. Inputs may be a dict of arrays;
        the model then takes them by keyword.
    loss: (the model's output, targets) -> mean over the batch; if none is given cross-entropy, or, where targets are
        zeros and ones of shape (N, labels), binary cross-entropy of each label.
    clients: how many share the training data by `partition`, or the places of each client's examples.
    normalization: for arrays of images. uint8 and [0, 1] pixels are then normalized when a batch is read; without it
        floating inputs go to the model as they are.
    buffers: how the model's buffers (running statistics) travel: averaged with the weights ("shared"), never leaving
        the client ("local"), or recomputed by the server ("recalibrated").
    perturb: the part of the inputs that data defenses may change, when inputs have several parts.
    """

    model: nn.Module
    loss: Loss
    train: Examples
    validation: Examples | None
    test: Examples
    clients: tuple[Tensor, ...]  # one per client: places in `train`
    classes: int | None  # None where the output is not one score per class, as with several labels at once
    label_names: tuple[str, ...]  # of the classes, or of the labels that an example may have
    shape: tuple[int, ...]  # of one input, or of its part `perturb` (else the first part)
    normalization: Normalization | None
    buffers: Buffers
    perturb: str | None
    name: str
    model_name: str
    description: dict[str, Any]  # plain data; a task built by name is `task(**description)` again
    data_hash: str  # SHA-256 of all examples
    note: str  # what is not as published in the data, else empty

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        loss: Loss | None = None,
        *,
        clients: int | Sequence[Tensor | Sequence[int]] = 4,
        split: str | Sequence[float] | Split = "70/15/15",
        partition: str | Partition = "iid",
        seed: int = 0,
        normalization: Normalization | None = None,
        buffers: Buffers = "shared",
        perturb: str | None = None,
        name: str = "own data",
    ) -> None:
        _check_buffers(buffers)
        check_model(model)
        parts = read_own_data(data, normalization, read_split(split), seed)
        loss = loss or _usual_loss(parts)
        classes = check_fit(model, loss, parts, perturb)
        members = _clients(clients, parts.train, _read_partition(partition), seed)
        given = [part for part in (parts.train, parts.validation, parts.test) if part is not None]
        _set(
            self,
            model=model,
            loss=loss,
            train=parts.train,
            validation=parts.validation,
            test=parts.test,
            clients=members,
            classes=classes,
            label_names=tuple(map(str, range(_kinds(parts.train, classes)))),
            shape=_shape(parts.train, perturb),
            normalization=normalization,
            buffers=buffers,
            perturb=perturb,
            name=name,
            note="",
            model_name=type(model).__name__,
            description={
                "name": name,
                "model": type(model).__name__,
                "clients": len(members),
                "examples": [len(part) for part in given],
                "seed": seed,
                "buffers": buffers,
            },
            data_hash=hashlib.sha256(" ".join(part.source_sha256 for part in given).encode()).hexdigest(),
        )

    @property
    def labels(self) -> int | None:
        """How many labels an example may have at once; None where each has one class."""
        return self.train.labels.shape[1] if self.train.multi_label else None

    @property
    def model_hash(self) -> str:
        """SHA-256 of the names and values of the model's parameters and buffers."""
        return fingerprint(sorted(self.model.state_dict().items()))

    def __repr__(self) -> str:
        return f"Task({self.name}, model={self.model_name}, clients={len(self.clients)}, train={len(self.train)})"


def task(
    name: str,
    *,
    model: str | ModelSpec | nn.Module = "lenet",
    clients: int = 4,
    split: str | Sequence[float] | Split = "own",
    partition: str | Partition = "iid",
    seed: int = 0,
    data_root: Path | str | None = None,
    limit: int | None = None,
    buffers: Buffers = "shared",
) -> Task:
    """Build a task from the name of a data set and of a model.

    >>> task("digits", model="mlp:hidden=[32]", clients=3)
    Task(digits, model=mlp, clients=3, train=1293)

    model: a registered name, with fields if wanted ("resnet18:norm=group"), its spec, or a module of your own.
    split: "own" (the data set's, with a tenth of the training part for validation if it has none), or shares of all
        examples pooled, such as "70/15/15" or (0.7, 0.15, 0.15).
    seed: of the split, the partition and the initial weights; torch's global generator is left as it was.
    data_root: where the data files are; else the environment's FEDVEIL_DATA, else ~/.cache/fedveil.
    limit: use only the first so many training examples.
    """
    _check_buffers(buffers)
    chosen_split, chosen_partition = read_split(split), _read_partition(partition)
    spec = models.parse(model) if isinstance(model, str) else model
    source: DataSet = datasets.parse(name)
    loaded = _load(source, data_root, limit)
    data: LoadedData | LoadedTokens
    module: nn.Module
    if isinstance(loaded, LoadedText):
        module, data = _text(loaded, spec, seed)
    else:
        data = loaded
        module = spec if isinstance(spec, nn.Module) else build_model(spec, data.shape, data.classes, seed)
    parts = _divide(data, chosen_split, seed, limit)
    made = Task(
        module,
        parts,
        clients=clients,
        partition=chosen_partition,
        seed=seed,
        buffers=buffers,
        perturb=PERTURBED if isinstance(data, LoadedTokens) else None,
        name=source.name,
    )
    named = isinstance(spec, ModelSpec)
    description = {
        "name": datasets.spell(source),
        "model": models.spell(spec) if named else type(spec).__name__,
        "clients": clients,
        "split": splits.spell(chosen_split),
        "partition": partitions.spell(chosen_partition),
        "seed": seed,
        "limit": limit,
        "buffers": buffers,
    }
    _set(
        made,
        classes=None if data.train.multi_label else len(data.class_names) or None,
        label_names=data.class_names,
        normalization=data.normalization,
        note=data.note,
        model_name=spec.name if named else type(spec).__name__,
        description=description,
        data_hash=data.sha256,
    )
    return made


def build_model(spec: ModelSpec, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The module of a spec with weights that depend on the seed alone."""
    with _seeded(seed):
        return spec.build(shape, classes)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's generator as the seed of a run sets it for initial weights; after that as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_key(seed, "model") % 2**64)
        yield


def _text(data: LoadedText, spec: ModelSpec | nn.Module, seed: int) -> tuple[TextModel, LoadedTokens]:
    """The model for a data set of text, and the texts as its tokens."""
    if not isinstance(spec, Transformer):
        given = spec.name if isinstance(spec, ModelSpec) else type(spec).__name__
        raise FedveilError(
            f"{data.name} is text, which {given} does not take: use {'bert' if data.classes else 'gpt2'}"
        )
    vocabulary = vocabulary_of(data, spec.pieces, spec.entries)
    with _seeded(seed):
        module = spec.build_text(data.name, vocabulary, data.length, data.classes)
    return module, tokenized(data, vocabulary, module.width)


def label_table(task: Task) -> list[list[int]]:
    """How many training examples of each class (or with each label) each client holds: clients × classes.

    >>> label_table(task("digits", clients=2, limit=20))
    [[0, 2, 1, 1, 1, 2, 1, 2, 0, 0], [3, 0, 1, 1, 1, 0, 1, 0, 2, 1]]
    """
    return holdings(task).counts


def holdings(task: Task) -> Holdings:
    """Who holds what in a task."""
    partition = str(task.description.get("partition", ""))
    return _holdings(task.train, task.clients, task.label_names, partition)


def holdings_of(
    name: str,
    *,
    clients: int = 4,
    split: str | Sequence[float] | Split = "own",
    partition: str | Partition = "iid",
    seed: int = 0,
    data_root: Path | str | None = None,
    limit: int | None = None,
) -> Holdings:
    """Who would hold what in the `task` of the same settings, without a model.

    >>> holdings_of("digits", clients=2, limit=20).sizes
    [10, 10]
    """
    chosen_split, chosen_partition = read_split(split), _read_partition(partition)
    loaded = _load(datasets.parse(name), data_root, limit)
    data = without_tokens(loaded) if isinstance(loaded, LoadedText) else loaded
    parts = _divide(data, chosen_split, seed, limit)
    members = _clients(clients, parts.train, chosen_partition, seed)
    return _holdings(parts.train, members, data.class_names, partitions.spell(chosen_partition))


def _holdings(train: Examples, clients: Sequence[Tensor], names: tuple[str, ...], partition: str) -> Holdings:
    held = [train.labels[places] for places in clients]
    if train.multi_label:
        counts = [labels.long().sum(0).tolist() for labels in held]
    elif train.next_tokens:
        counts = [[] for _ in held]
    else:
        counts = [torch.bincount(labels, minlength=len(names)).tolist() for labels in held]
    sizes = [len(labels) for labels in held]
    return Holdings(labels=list(names), sizes=sizes, counts=counts, several=train.multi_label, partition=partition)


def _kinds(train: Examples, classes: int | None) -> int:
    """How many labels there are; running text has none."""
    if train.next_tokens:
        return 0
    return train.labels.shape[1] if train.multi_label else classes or int(train.labels.max()) + 1


def _load(source: DataSet, data_root: Path | str | None, limit: int | None) -> LoadedData | LoadedText:
    if limit is not None and limit < 1:
        raise FedveilError(f"limit must be at least 1, got {limit}")
    return source.load(None if data_root is None else Path(data_root))


def _divide(data: LoadedData | LoadedTokens, split: Split, seed: int, limit: int | None) -> Parts:
    if data.note:
        logger.warning("%s: %s", data.name, data.note)
    parts = split.divide(data, seed)
    if limit is not None:
        parts = Parts(parts.train.subset(range(min(limit, len(parts.train)))), parts.validation, parts.test)
    return parts


def _usual_loss(parts: Parts) -> Loss:
    if parts.train.next_tokens:
        return next_token_loss
    return functional.binary_cross_entropy_with_logits if parts.train.multi_label else functional.cross_entropy


def _clients(
    clients: int | Sequence[Tensor | Sequence[int]], train: Examples, partition: Partition, seed: int
) -> tuple[Tensor, ...]:
    if isinstance(clients, int):
        return partition.assign(train.labels, clients, seed)
    members = tuple(torch.as_tensor(places, dtype=torch.int64) for places in clients)
    if not members:
        raise FedveilError("clients must be at least 1, got an empty list")
    for number, places in enumerate(members):
        if places.dim() != 1 or not len(places) or places.min() < 0 or places.max() >= len(train):
            raise FedveilError(
                f"client {number} must have at least one place in the training data, 0 to {len(train) - 1}"
            )
    return members


def _read_partition(given: str | Partition) -> Partition:
    found = partitions.parse(given) if isinstance(given, str) else given
    if not isinstance(found, Partition):
        raise FedveilError(f"partition must be a name such as 'iid' or a Partition, not {type(given).__name__}")
    return found


def _shape(train: Examples, perturb: str | None) -> tuple[int, ...]:
    inputs, _ = train.batch([0])
    chosen = leaf(inputs, perturb) if perturb is not None else next(iter(leaves(inputs).values()))
    return tuple(chosen.shape[1:])


def _check_buffers(buffers: str) -> None:
    if buffers not in get_args(Buffers):
        raise FedveilError(f"buffers must be one of {', '.join(get_args(Buffers))}, not '{buffers}'")


def _set(made: Task, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(made, name, value)
