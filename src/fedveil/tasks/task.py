"""Tasks by name, and the labels of their clients. `Task` itself, for your own models and data, is in `definition`."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.errors import FedveilError, printable
from fedveil.registry import datasets, models
from fedveil.tasks.client_labels import ClientLabels
from fedveil.tasks.datasets.base import DataSet, LoadedData
from fedveil.tasks.datasets.table import LoadedTable
from fedveil.tasks.datasets.text import LoadedText
from fedveil.tasks.definition import (
    Buffers,
    Task,
    check_buffers,
    described,
    input_shape,
    label_names,
    read_partition,
    shared_out,
)
from fedveil.tasks.examples import Examples
from fedveil.tasks.from_files import CLIENTS, FileData, FileModel, read_file_data
from fedveil.tasks.hub import saved_folder
from fedveil.tasks.models.base import ModelSpec
from fedveil.tasks.models.transformer import TextModel, Transformer
from fedveil.tasks.own_data import OwnData
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.tasks.partition import Partition, partitions
from fedveil.tasks.randomness import derived_key
from fedveil.tasks.splits import Loaded, Split, read_split, splits
from fedveil.tasks.tokens import PERTURBED, LoadedTokens, tokenized, without_tokens
from fedveil.tasks.vocabulary import vocabulary_of

__all__ = ["Buffers", "Task", "build_model", "client_labels", "client_labels_of", "label_table", "read_model", "task"]

logger = logging.getLogger(__name__)

Model = ModelSpec | FileModel


def task(
    name: str,
    *,
    model: str | ModelSpec | nn.Module = "lenet",
    clients: int = CLIENTS,
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

    name: a registered name, or "file.py:dataset": data of your own in a Python file, as `Task` takes them, a dict of
        `Task`'s keywords, or a function that returns one of these.
    model: a registered name, with fields if wanted ("resnet18:norm=group"), its spec, a module of your own, or
        "file.py:Net", a class or function in a Python file, called with nothing, or with `shape` and `classes` if it
        takes them.
    split: "own" (the data set's, with a tenth of the training part for validation if it has none), or shares of all
        examples pooled, such as "70/15/15" or (0.7, 0.15, 0.15).
    seed: of the split, the partition, the limit and the initial weights; torch's global generator is left as it was.
    data_root: where the data files are; by default the environment's FEDVEIL_DATA, else ~/.cache/fedveil.
    limit: use at most this many training examples, chosen at random in proportion to the classes; the other parts are
        reduced in the same proportion, but not below 256 examples.
    """
    check_buffers(buffers)
    chosen_split, chosen_partition = read_split(split), read_partition(partition)
    spec = read_model(model) if isinstance(model, str) else model
    description = {
        "name": name,
        "model": _spelled(spec),
        "clients": clients,
        "split": splits.spell(chosen_split),
        "partition": partitions.spell(chosen_partition),
        "seed": seed,
        "limit": limit,
        "buffers": buffers,
    }
    model_name = type(spec).__name__ if isinstance(spec, nn.Module) else spec.name
    code = [spec.reference.sha256()] if isinstance(spec, FileModel) else []
    if is_reference(name):
        file = read_file_data(name, clients, chosen_split, seed)
        own, rest = file.own, file.rest()
        target = own.parts.train.target
        classes = math.prod(target.shape) if target.kind == "numbers" else len(_file_names(file))
        module = spec if isinstance(spec, nn.Module) else build_model(spec, input_shape(own.parts.train), classes, seed)
        made = Task(
            module,
            own,
            clients=clients,
            partition=chosen_partition,
            seed=seed,
            limit=limit,
            buffers=buffers,
            name=file.reference.short,
            **rest,
        )
        description |= {"name": str(file.reference), "clients": len(made.clients)}
        if own.clients is not None:
            del description["partition"]
        code += [file.code_hash] if file.code_hash else []
        return described(made, model_name=model_name, description=description, code_hash=_together(code))
    source: DataSet = datasets.parse(name)
    loaded = _load(source, data_root)
    data: Loaded
    if isinstance(loaded, LoadedText):
        module, data = _text(loaded, spec, seed)
    else:
        data = loaded
        module = spec if isinstance(spec, nn.Module) else build_model(spec, data.shape, data.classes, seed)
    made = Task(
        module,
        _divided(data, chosen_split, seed),
        clients=clients,
        partition=chosen_partition,
        seed=seed,
        limit=limit,
        buffers=buffers,
        perturb=PERTURBED if isinstance(data, LoadedTokens) else None,
        name=source.name,
    )
    return described(
        made,
        classes=None if data.train.multi_label else len(data.class_names) or None,
        label_names=tuple(map(printable, data.class_names)),
        normalization=data.normalization,
        note=data.note,
        model_name=model_name,
        description=description | {"name": datasets.spell(source)},
        data_hash=data.sha256,
        code_hash=_together(code),
    )


def read_model(text: str) -> Model:
    """A model as the command line names it. A file must exist, but is not run yet."""
    if is_reference(text):
        return FileModel(Reference.read(text))
    found: ModelSpec = models.parse(text)
    return found


def build_model(spec: Model, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The module of a spec with weights that depend on the seed alone."""
    with _seeded(seed):
        return spec.build(shape, classes)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator for initial weights, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_key(seed, "model") % 2**64)
        yield


def _text(data: LoadedText, spec: Model | nn.Module, seed: int) -> tuple[TextModel, LoadedTokens]:
    """The model for a data set of text, and the texts as its tokens."""
    if not isinstance(spec, Transformer):
        given = type(spec).__name__ if isinstance(spec, nn.Module) else spec.name
        raise FedveilError(
            f"{data.name} is text, which {given} does not take: use {'bert' if data.classes else 'gpt2'}"
        )
    saved = None if spec.weights is None else saved_folder(spec.weights)
    vocabulary = vocabulary_of(data, spec.pieces, spec.entries, saved)
    with _seeded(seed):
        module = spec.build_text(data.name, vocabulary, data.length, data.classes)
    return module, tokenized(data, vocabulary, module.width)


def label_table(task: Task) -> list[list[int]]:
    """How many training examples of each class (or with each label) each client holds: clients × classes.

    >>> label_table(task("digits", clients=2, limit=20))
    [[0, 0, 2, 1, 1, 1, 1, 2, 1, 1], [2, 2, 0, 1, 1, 1, 1, 0, 1, 1]]
    """
    return client_labels(task).counts


def client_labels(task: Task) -> ClientLabels:
    """How the labels of a task are distributed over its clients."""
    partition = str(task.description.get("partition", ""))
    return _count_labels(task.train, task.clients, task.label_names, partition)


def client_labels_of(
    name: str,
    *,
    clients: int = CLIENTS,
    split: str | Sequence[float] | Split = "own",
    partition: str | Partition = "iid",
    seed: int = 0,
    data_root: Path | str | None = None,
    limit: int | None = None,
) -> ClientLabels:
    """The same for the `task` of these settings, without building a model.

    >>> client_labels_of("digits", clients=2, limit=20).sizes
    [10, 10]
    """
    chosen_split, chosen_partition = read_split(split), read_partition(partition)
    if is_reference(name):
        file = read_file_data(name, clients, chosen_split, seed)
        own, names = file.own, _file_names(file)
    else:
        loaded = _load(datasets.parse(name), data_root)
        data = without_tokens(loaded) if isinstance(loaded, LoadedText) else loaded
        own, names = _divided(data, chosen_split, seed), tuple(map(printable, data.class_names))
    parts, members = shared_out(own, clients, chosen_partition, seed, limit)
    shown = partitions.spell(chosen_partition) if own.clients is None else ""
    return _count_labels(parts.train, members, names, shown)


def _count_labels(train: Examples, clients: Sequence[Tensor], names: tuple[str, ...], partition: str) -> ClientLabels:
    held = [train.labels[indices] for indices in clients]
    if train.multi_label:
        counts = [labels.long().sum(0).tolist() for labels in held]
    elif train.next_tokens or train.numbers:
        counts = [[] for _ in held]
    else:
        counts = [torch.bincount(labels, minlength=len(names)).tolist() for labels in held]
    sizes = [len(labels) for labels in held]
    return ClientLabels(labels=list(names), sizes=sizes, counts=counts, several=train.multi_label, partition=partition)


# Data sets that were read already, by their source and place, while a caller of `read_once` keeps them.
_read: ContextVar[dict[Any, Any] | None] = ContextVar("_read", default=None)


@contextmanager
def read_once(kept: dict[Any, Any]) -> Iterator[None]:
    """Within it, a data set that is in `kept` is not read again, and one that is read is put there."""
    token = _read.set(kept)
    try:
        yield
    finally:
        _read.reset(token)


def _load(source: DataSet, data_root: Path | str | None) -> LoadedData | LoadedText | LoadedTable:
    kept, root = _read.get(), None if data_root is None else Path(data_root)
    if kept is None:
        return source.load(root)
    name = (datasets.spell(source), root)
    if name not in kept:
        kept[name] = source.load(root)
    found: LoadedData | LoadedText | LoadedTable = kept[name]
    return found


def _divided(data: Loaded, split: Split, seed: int) -> OwnData:
    if data.note:
        logger.warning("%s: %s", data.name, data.note)
    return OwnData(split.divide(data, seed))


def _file_names(file: FileData) -> tuple[str, ...]:
    """One name for every class or label of the data, before there is a model."""
    parts = file.own.parts
    given: Sequence[str] | None = file.said.get("class_names")
    if given is None and parts.train.numbers:
        return ()
    if given is None and parts.train.labels.dim() == 1:
        every = [part.labels for part in (parts.train, parts.validation, parts.test) if part is not None]
        kinds = max(int(torch.cat(every).max()) + 1, len(file.own.class_names))
    else:
        kinds = parts.train.labels.shape[1] if parts.train.multi_label else len(given or ())
    return label_names(parts.train, kinds, given, file.own.class_names)


def _spelled(spec: Model | nn.Module) -> str:
    if isinstance(spec, FileModel):
        return str(spec.reference)
    return type(spec).__name__ if isinstance(spec, nn.Module) else models.spell(spec)


def _together(hashes: list[str]) -> str:
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest() if hashes else ""
