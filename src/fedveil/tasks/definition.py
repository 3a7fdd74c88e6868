"""The task: a model, a loss and the data of every client, checked when it is made."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.errors import FedveilError, printable
from fedveil.tasks.arrays import check_not_one_hot
from fedveil.tasks.columns import Column, Columns
from fedveil.tasks.examples import Examples, TargetForm
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tasks.inputs import leaf, leaves
from fedveil.tasks.limits import limited
from fedveil.tasks.model_check import Loss, check_fit, check_model, floating_type
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.own_data import OwnData, Reader
from fedveil.tasks.partition import IID, Partition, partitions
from fedveil.tasks.regression import squared_error
from fedveil.tasks.splits import Parts, Split, read_split
from fedveil.tasks.text_form import TextForm
from fedveil.tasks.tokens import next_token_loss

Buffers = Literal["shared", "local", "recalibrated"]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Task:
    """A model, a loss and the clients' data: what a federation learns and an audit attacks.

    Bring your own::

        Task(model=my_module, data=my_dataset)
        Task(model=my_module, data=(images, labels), clients=10)
        Task(model=my_module, data=((x, y), (x_test, y_test)), loss=my_loss)
        Task(model=my_module, clients=[hospital_a, hospital_b])

    or build one by name with `task("fashion-mnist", model="lenet")`. Everything is checked when it is made.

    model: any module; it is not copied, and training starts from its weights. Inputs are converted to its floating
        type.
    data: a map-style torch `Dataset` of (input, label), a pair of arrays (inputs, targets), or a tuple (train, test)
        or (train, validation, test) of these. One set alone is divided by `split`. Inputs may be a dict of arrays;
        the model then takes them by keyword.
    loss: (the model's output, targets) -> mean over the batch; by default cross-entropy, or, if targets are zeros and
        ones of shape (N, labels), binary cross-entropy of each label, or, if they are floating numbers (N,) or
        (N, numbers), the mean squared error.
    clients: a number, and `partition` divides the training data; or the rows of each client,
        [range(0, 600), range(600, 1200)]; or, without `data`, a data set for each. With rows of a single set, those
        that belong to no client are held out; if there are none, each client's own rows are divided by `split`. If the
        data come in parts, rows are rows of the training part.
    split: how a single set is divided, "70/15/15" (train/validation/test) or "80/20" (train/test); by default 70/15/15.
    limit: use at most this many training examples, chosen at random in proportion to classes and clients; the other
        parts are reduced in the same proportion, but not below 256 examples.
    normalization: of images. uint8 and [0, 1] pixels are normalized when a batch is read; without it, floating inputs
        go to the model as they are.
    normalized: the inputs are already normalized, as by torchvision's transforms; `normalization` says how.
    class_names: of the classes or labels, in order; by default those in the data set's `classes`, if it has any.
    buffers: how the model's buffers (running statistics) travel: averaged with the weights ("shared"), never leaving
        the client ("local"), or recomputed by the server ("recalibrated").
    columns: the inputs are rows of a table, with these columns: a list of names, or of `Column`s (of categories, or
        with a range). Rows are an array (rows, columns), or a dict of a list of values for each column, all of which
        "inferred" takes. Numbers are standardized by the training part; categories get a place each.
    perturb: the part of the inputs that data defenses may change, when inputs have several parts.
    """

    model: nn.Module
    loss: Loss
    train: Examples
    validation: Examples | None
    test: Examples
    clients: tuple[Tensor, ...]  # one per client: indices in `train`
    classes: int | None  # None if the output is not one score per class, as with several labels, or in regression
    label_names: tuple[str, ...]  # of the classes, or of the labels that an example may have
    shape: tuple[int, ...]  # of one input, or of its part `perturb` (by default the first part)
    normalization: Normalization | None
    columns: Columns | None  # of a table
    text: TextForm | None  # of sentences
    buffers: Buffers
    perturb: str | None
    name: str
    model_name: str
    description: dict[str, Any]  # plain data; a task built by name is `task(**description)` again
    data_hash: str  # SHA-256 of all examples
    note: str  # how the data differ from the published ones; may be empty
    code_hash: str  # SHA-256 of the Python files that model and loss came from; empty if they did not come from files

    def __init__(
        self,
        model: nn.Module,
        data: Any = None,
        loss: Loss | None = None,
        *,
        clients: int | Sequence[Any] = 4,
        split: str | Sequence[float] | Split | None = None,
        partition: str | Partition = "iid",
        seed: int = 0,
        limit: int | None = None,
        normalization: Normalization | None = None,
        normalized: bool = False,
        class_names: Sequence[str] | None = None,
        columns: Sequence[str | Column] | str | None = None,
        buffers: Buffers = "shared",
        perturb: str | None = None,
        name: str = "own data",
    ) -> None:
        check_buffers(buffers)
        check_model(model)
        chosen_partition = read_partition(partition)
        own = data
        if not isinstance(data, OwnData):
            chosen_split = None if split is None else read_split(split)
            reader = Reader(chosen_split, seed, normalization, normalized, columns)
            own = reader.read(data, clients)
            if loss is None:
                check_not_one_hot(own.parts.train.labels)
        parts, members = shared_out(own, clients, chosen_partition, seed, limit)
        parts = parts.as_type(floating_type(model)).standardized()
        loss = loss or _usual_loss(parts)
        classes = check_fit(model, loss, parts, perturb)
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
            label_names=label_names(parts.train, classes, class_names, own.class_names),
            shape=input_shape(parts.train, perturb),
            normalization=normalization,
            columns=parts.train.columns,
            text=parts.train.text,
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
            code_hash="",
        )

    @property
    def labels(self) -> int | None:
        """How many labels an example may have at once; None if each has one class."""
        return self.train.labels.shape[1] if self.train.multi_label else None

    @property
    def target(self) -> TargetForm:
        """What one target looks like."""
        return self.train.target

    @property
    def model_hash(self) -> str:
        """SHA-256 of the names and values of the model's parameters and buffers, and of the file it came from."""
        weights = fingerprint(sorted(self.model.state_dict().items()))
        return hashlib.sha256(f"{weights} {self.code_hash}".encode()).hexdigest() if self.code_hash else weights

    def __repr__(self) -> str:
        return f"Task({self.name}, model={self.model_name}, clients={len(self.clients)}, train={len(self.train)})"


def shared_out(
    own: OwnData, clients: int | Sequence[Any], partition: Partition, seed: int, limit: int | None
) -> tuple[Parts, tuple[Tensor, ...]]:
    """The examples, at most as many as the limit allows, and every client's indices in the training part."""
    parts, members = own.parts, own.clients
    if members is not None and partition != IID():
        raise FedveilError("the examples of each client are given: leave the partition out")
    if limit is not None:
        parts, members = limited(parts, members, limit, seed)
    if members is None:
        if not isinstance(clients, int | np.integer):
            raise FedveilError("clients must be a number here; the rows of each can be given for data of your own")
        members = partition.assign(parts.train.labels, int(clients), seed)
    return parts, members


def label_names(
    train: Examples, classes: int | None, given: Sequence[str] | None = None, found: Sequence[str] = ()
) -> tuple[str, ...]:
    """The names of classes or labels: those given, else those of the data set, else their numbers."""
    kinds = _kinds(train, classes)
    if given is not None and train.numbers:
        raise FedveilError("the targets are numbers, which have no classes: leave class_names out")
    if given is None:
        return tuple(found[:kinds]) + tuple(map(str, range(len(found), kinds)))
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise FedveilError('class_names must be the names of the classes, such as ("cat", "dog")')
    if len(given) != kinds:
        what = "labels" if train.multi_label else "classes" if classes is None else "outputs of the model"
        raise FedveilError(f"{len(given)} class_names for {kinds} {what}: give one name for each")
    return tuple(printable(name) for name in given)


def _kinds(train: Examples, classes: int | None) -> int:
    """How many labels there are; running text and numbers have none."""
    if train.next_tokens or train.numbers:
        return 0
    return train.labels.shape[1] if train.multi_label else classes or int(train.labels.max()) + 1


def _usual_loss(parts: Parts) -> Loss:
    if parts.train.next_tokens:
        return next_token_loss
    if parts.train.numbers:
        return squared_error
    return functional.binary_cross_entropy_with_logits if parts.train.multi_label else functional.cross_entropy


def read_partition(given: str | Partition) -> Partition:
    """The partition of this name; a `Partition` is returned as it is."""
    found = partitions.parse(given) if isinstance(given, str) else given
    if not isinstance(found, Partition):
        raise FedveilError(f"partition must be a name such as 'iid' or a Partition, not {type(given).__name__}")
    return found


def input_shape(train: Examples, perturb: str | None = None) -> tuple[int, ...]:
    """The shape of one input, or of its part that may be perturbed."""
    inputs, _ = train.batch([0])
    chosen = leaf(inputs, perturb) if perturb is not None else next(iter(leaves(inputs).values()))
    return tuple(chosen.shape[1:])


def check_buffers(buffers: str) -> None:
    """Refuse an unknown way for buffers to travel."""
    if buffers not in get_args(Buffers):
        raise FedveilError(f"buffers must be one of {', '.join(get_args(Buffers))}, not '{buffers}'")


def _set(made: Task, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(made, name, value)


def described(made: Task, **values: Any) -> Task:
    """Add what is known of a task that was just made by name."""
    _set(made, **values)
    return made


def trained_on(task: Task, examples: Examples, clients: Sequence[Sequence[int]]) -> Task:
    """The same task with other training examples, of which each client has these; its description stays."""
    made = copy.copy(task)
    _set(
        made,
        train=examples.as_type(task.train.dtype),
        clients=tuple(torch.as_tensor(each, dtype=torch.int64) for each in clients),
    )
    return made
