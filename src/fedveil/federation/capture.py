"""Captured updates: what a server or an eavesdropper saw of one client, and nothing it would not see.

A capture is a file in the safetensors format, so that updates captured elsewhere, by any framework, can be attacked
too. Its tensors are named

    before/NAME          the trained parameter NAME as the server sent it to the client
    shared/NAME          what the client sent back for it: same names, shapes and floating type
    buffers/NAME         optional: the model's buffer NAME as the client sent it back
    buffers_before/NAME  optional: that buffer as the server sent it to the client

where NAME is the name in the model's `named_parameters()` or `named_buffers()`. The file's metadata has an entry
`fedveil`, a JSON object with these fields, all of them required but the last:

    format, version      "fedveil-capture", 1
    kind                 what `shared` is: "gradient", "weights" (after local training) or "delta" (their change)
    client, round        whose message it is and of which round; rounds count from 1
    steps                local steps behind the message; 1 for a gradient
    lr                   a list: the learning rate of each step
    momentum             of the client's local steps; 0 for a gradient
    batch_sizes          a list: the number of examples of each step
    facts                an object of further public settings. fedveil writes model, loss, shape, classes, mean, std
                         (of the normalization, or null), defense, local_epochs, weight_decay and buffers; none is
                         required.
    sha256               optional: the SHA-256 of the header and the tensors (`tensorfile.seal`). fedveil writes it;
                         where it is given it must match, so that a flipped bit is noticed.

A second entry of the metadata, `fedveil.order`, may list the names of the tensors in the model's order, which the
format does not keep.

Inputs, labels and the inputs that a data defense made of them are never in it. Those are the client's: they go into
a `Truth`, a file of its own ("fedveil-truth", 1), which serves to score an attack and for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn

from fedveil.clients.engine import Tensors
from fedveil.defenses.base import MessageKind, step_weight
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.federation.facts import PublicFacts
from fedveil.fields import problems
from fedveil.intake import Intake
from fedveil.tasks.inputs import Inputs, count, leaves
from fedveil.tensorfile import Header, grouped, prefixed, read_tensors, seal, write_tensors
from fedveil.tree import Tree

CAPTURE = "fedveil-capture"
TRUTH = "fedveil-truth"
VERSION = 1
MOST_STEPS = 100_000  # local steps behind one message
MOST_EXAMPLES = 1_000_000  # of one step


@dataclass(frozen=True, eq=False)
class Capture:
    """One client's message and what its receiver knows besides. Rows are plain dicts, without a client axis.

    Everything is checked when it is made: a capture that exists is complete, finite and consistent.
    """

    kind: MessageKind
    before: Tensors
    shared: Tensors
    client: int
    round: int
    lr: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    steps: int = 1
    momentum: float = 0.0
    buffers: Tensors | None = None  # None where buffers are not shared
    buffers_before: Tensors | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    public: PublicFacts = field(init=False, repr=False)  # the facts that fedveil knows, with their types

    def __post_init__(self) -> None:
        for name in ("buffers", "buffers_before"):
            object.__setattr__(self, name, getattr(self, name) or None)  # a model without buffers shares none
        for name in ("lr", "batch_sizes"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        wrong = _fields_wrong(self) or _numbers_wrong(self) or _tensors_wrong(self)
        if wrong:
            raise FedveilError(f"not a valid capture: {wrong}")
        object.__setattr__(self, "public", PublicFacts.of(self.facts))

    def check(self, model: nn.Module) -> None:
        """Refuse a model that this update cannot come from, naming the first misfit."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wrong = _fits(self.before, trained, "parameter", complete=True)
        for row in (self.buffers, self.buffers_before):
            wrong = wrong or _fits(row or {}, dict(model.named_buffers()), "buffer", complete=False)
        if wrong:
            raise FedveilError(f"the captured update does not fit the model {type(model).__name__}: {wrong}")

    def save(self, path: Path | str) -> None:
        """Write the file that the head of this module describes."""
        write_tensors(Path(path), self.header(), self._tensors())

    @property
    def content(self) -> str:
        """The SHA-256 of all that it holds: the one that its file carries."""
        return seal(self.header().model_dump_json(), self._tensors())

    def _tensors(self) -> Tensors:
        """As they are named in the file."""
        tensors = {**prefixed("before", self.before), **prefixed("shared", self.shared)}
        return tensors | prefixed("buffers", self.buffers or {}) | prefixed("buffers_before", self.buffers_before or {})

    def header(self) -> CaptureHeader:
        """All but the tensors, as it is written."""
        return CaptureHeader(
            format=CAPTURE,
            version=VERSION,
            kind=self.kind,
            client=self.client,
            round=self.round,
            steps=self.steps,
            lr=list(self.lr),
            momentum=self.momentum,
            batch_sizes=list(self.batch_sizes),
            facts=self.facts,
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read such a file; whatever is wrong with it is told in one line."""
        header, tensors = read_tensors(Path(path), CaptureHeader, CAPTURE, VERSION)
        groups = grouped(tensors)
        unknown = sorted(groups.keys() - {"before", "shared", "buffers", "buffers_before"})
        if unknown:
            raise FedveilError(f"{path}: not a valid capture: it holds '{unknown[0]}', which no capture has")
        try:
            return cls(
                kind=header.kind,
                before=groups.get("before", {}),
                shared=groups.get("shared", {}),
                buffers=groups.get("buffers"),
                buffers_before=groups.get("buffers_before"),
                client=header.client,
                round=header.round,
                steps=header.steps,
                lr=tuple(header.lr),
                momentum=header.momentum,
                batch_sizes=tuple(header.batch_sizes),
                facts=header.facts,
            )
        except FedveilError as error:
            raise FedveilError(f"{path}: {error}") from None


@dataclass(frozen=True, eq=False)
class Truth:
    """The client's side of a capture, for scoring only. Several local batches stand one behind another."""

    inputs: Inputs  # as the model takes them
    targets: Tensor
    seen: Inputs  # what the gradient was taken at: a perfect inversion yields these

    def __post_init__(self) -> None:
        for what, inputs in (("inputs", self.inputs), ("seen", self.seen)):
            if not self.targets.dim() or not leaves(inputs) or count(inputs) != len(self.targets):
                raise FedveilError(f"not a valid truth: {what} and targets differ in their number of examples")
            named = {f"{what}/{name}" if name else what: tensor for name, tensor in leaves(inputs).items()}
            wrong = _alone_wrong({"targets": self.targets, **named})
            if wrong:
                raise FedveilError(f"not a valid truth: it {wrong}")
        shapes = [{name: tensor.shape for name, tensor in leaves(each).items()} for each in (self.inputs, self.seen)]
        if shapes[0] != shapes[1]:
            raise FedveilError("not a valid truth: the inputs and what was seen of them differ in shape")

    def save(self, path: Path | str) -> None:
        """Write it to a file of its own."""
        tensors = {"targets": self.targets, **_spread("inputs", self.inputs), **_spread("seen", self.seen)}
        write_tensors(Path(path), Header(format=TRUTH, version=VERSION), tensors)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote."""
        _, tensors = read_tensors(Path(path), Header, TRUTH, VERSION)
        groups = grouped(tensors)
        missing = sorted({"inputs", "targets", "seen"} - groups.keys())
        if missing:
            raise FedveilError(f"{path} is not a valid truth: {missing[0]} is missing")
        if len(groups) > 3 or "targets" not in tensors or len(groups["targets"]) > 1:
            raise FedveilError(f"{path} is not a valid truth: it holds more than inputs, targets and seen")
        try:
            return cls(_gathered(groups["inputs"]), tensors["targets"], _gathered(groups["seen"]))
        except FedveilError as error:
            raise FedveilError(f"{path}: {error}") from None


class Captured:
    """A captured update with the truth behind it, as a simulation has both: in memory, or in their files.

    What lies in files is read when it is asked for and not kept: hold on to `capture` where it is used repeatedly.
    """

    def __init__(self, capture: Capture, truth: Truth) -> None:
        self.client, self.round = capture.client, capture.round
        self._capture: Capture | Path = capture
        self._truth: Truth | Path = truth

    @property
    def capture(self) -> Capture:
        """What the server saw."""
        if isinstance(self._capture, Capture):
            return self._capture
        found = Capture.load(self._capture)
        if (found.client, found.round) != (self.client, self.round):
            raise FedveilError(
                f"{self._capture} is of client {found.client} in round {found.round}, "
                f"not of client {self.client} in round {self.round}"
            )
        return found

    @property
    def truth(self) -> Truth:
        """The client's side of it."""
        return self._truth if isinstance(self._truth, Truth) else Truth.load(self._truth)

    def saved(self, capture: Path, truth: Path) -> Captured:
        """Write both files; returns the same update without its tensors, which are read again on demand."""
        self.capture.save(capture)
        self.truth.save(truth)
        return self.stored(self.client, self.round, capture, truth)

    @classmethod
    def stored(cls, client: int, number: int, capture: Path, truth: Path) -> Captured:
        """The update of a client in round `number` that lies in these two files."""
        made = cls.__new__(cls)
        made.client, made.round, made._capture, made._truth = client, number, capture, truth
        return made


def capture(
    model: nn.Module | Mapping[str, Tensor],
    update: Mapping[str, Tensor],
    *,
    batch_sizes: int | Sequence[int],
    kind: MessageKind = "gradient",
    lr: float | Sequence[float] | None = None,
    momentum: float = 0.0,
    facts: Mapping[str, Any] | None = None,
) -> Capture:
    """What a server sees of one update, made by any loop: the weights that it had sent out, and what came back.

    model: as the server sent it (or its trained weights by name). It may train on afterwards: tensors are copied.
    update: by parameter name; buffers that were sent along may be among them, as `state_dict()` has them.
    batch_sizes, lr: of the client's local steps, one number or one each. For a gradient lr does not matter.
    facts: further public settings, by the names at the head of this module.

    Neither inputs nor labels go in. To score an audit of your own, keep them beside it in a `Truth(x, y, seen=x)`.

    >>> model = nn.Linear(4, 3)
    >>> x, y = torch.rand(2, 4), torch.tensor([0, 2])
    >>> nn.functional.cross_entropy(model(x), y).backward()
    >>> seen = capture(model, {name: p.grad for name, p in model.named_parameters()}, batch_sizes=2)
    >>> seen.kind, seen.steps, sorted(seen.shared)
    ('gradient', 1, ['bias', 'weight'])
    """
    if kind != "gradient" and lr is None:
        raise FedveilError(f"a capture of kind '{kind}' needs lr=, the learning rate of the client's local steps")
    weights: Mapping[str, Tensor]
    if isinstance(model, nn.Module):
        weights, known = {n: p for n, p in model.named_parameters() if p.requires_grad}, dict(model.named_buffers())
    else:
        weights, known = model, {}
    buffers = {name: tensor for name, tensor in update.items() if name in known}
    sizes = (batch_sizes,) if isinstance(batch_sizes, int) else tuple(batch_sizes)
    rates = (1.0 if lr is None else lr,) * len(sizes) if not isinstance(lr, Sequence) else tuple(lr)
    return Capture(
        kind=kind,
        before=_copied(weights),
        shared=_copied({name: tensor for name, tensor in update.items() if name not in known}),
        buffers=_copied(buffers),
        buffers_before=_copied({name: known[name] for name in buffers}),
        client=0,
        round=1,
        steps=len(sizes),
        lr=rates,
        momentum=momentum,
        batch_sizes=sizes,
        facts=dict(facts or {}),
    )


def _copied(row: Mapping[str, Tensor]) -> Tensors:
    """Tensors that nothing moves any more; what is no tensor is left for the capture to refuse."""
    return {name: t.detach().clone() if isinstance(t, Tensor) else t for name, t in row.items()}


def stack(captures: Sequence[Capture], buffers: Mapping[str, Tensor] | None = None) -> Updates:
    """Captures as one stack of updates. `buffers`: the model's own, for those that a capture does not tell."""
    if not captures:
        raise FedveilError("there is no captured update to stack")
    first, rows = captures[0], [{**(buffers or {}), **(capture.buffers_before or {})} for capture in captures]
    for capture, row in zip(captures, rows, strict=True):
        wrong = _differs(first, capture)
        for what, one, other in (("parameters", first.before, capture.before), ("buffers", rows[0], row)):
            if _form(one) != _form(other):
                wrong = wrong or f"the names, shapes or types of their {what} differ"
        if wrong:
            raise FedveilError(f"captured updates that are stacked must be alike: {wrong}")
    return Updates(
        kind=first.kind,
        before=_stacked([capture.before for capture in captures]),
        message=Tree.stack([capture.shared for capture in captures]),
        buffers=_stacked(rows),
        lr=first.lr,
        batch_sizes=first.batch_sizes,
        momentum=first.momentum,
        weight_decay=(first.public.weight_decay or 0.0) if first.kind != "gradient" else 0.0,
        local_epochs=first.public.local_epochs or 1,
    )


def _differs(one: Capture, other: Capture) -> str | None:
    for name in ("kind", "lr", "momentum", "batch_sizes"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} is {getattr(one, name)!s:.80} and {getattr(other, name)!s:.80}"
    for name in ("weight_decay", "local_epochs"):
        if getattr(one.public, name) != getattr(other.public, name):
            return f"{name} is {getattr(one.public, name)} and {getattr(other.public, name)}"
    return None


def _form(row: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in row.items()}


def _stacked(rows: Sequence[Tensors]) -> Tree:
    """One copy, where all rows are equal: an attack on one model is faster than on many."""
    first = rows[0]
    same = all(row is first or all(torch.equal(row[name], first[name]) for name in first) for row in rows)
    return Tree.expand(first, len(rows)) if same else Tree.stack(rows)


def pseudo_gradient(capture: Capture) -> Tensors:
    """The gradient that the update stands for: see `Updates.gradient`."""
    return stack([capture]).gradient.row(0)


class CaptureHeader(Header):
    """The JSON header of a capture file."""

    kind: Literal["gradient", "weights", "delta"]
    client: Annotated[int, Field(lt=2**31)]
    round: Annotated[int, Field(lt=2**31)]
    steps: Annotated[int, Field(le=MOST_STEPS)]  # each is repeated by the attack
    lr: list[float]
    momentum: float
    batch_sizes: list[Annotated[int, Field(le=MOST_EXAMPLES)]]
    facts: dict[str, Any]


def _fields_wrong(capture: Capture) -> str | None:
    """What is of a wrong type or too large, or among the facts, if anything."""
    try:
        capture.header()
        told = PublicFacts.of(capture.facts)
    except pydantic.ValidationError as error:
        return problems(error)
    except (TypeError, OverflowError):
        return "lr and batch_sizes must be lists of numbers, one per step"
    except FedveilError as error:
        return str(error)
    if told.local_epochs and capture.steps % told.local_epochs:
        return f"its {capture.steps} steps cannot be those of {told.local_epochs} local epochs"
    return None


def _tensors_wrong(capture: Capture) -> str | None:
    """What a server would not take, or could not have sent out."""
    groups = {"before": capture.before, "buffers_before": capture.buffers_before}
    if capture.buffers_before is None:
        groups["buffers"] = capture.buffers
    for name, row in groups.items():
        wrong = None if row is None and name != "before" else _alone_wrong(row)
        if wrong:
            return f"{name} {wrong}"
    if not capture.before:
        return "it has no 'before' tensors"
    for name, tensor in capture.before.items():
        if not tensor.is_floating_point():
            return f"before has {name} of type {tensor.dtype}: what is trained is of a floating type"
    wrong = Intake(capture.before).refuse(capture.shared)
    if wrong:
        return f"shared {wrong}"
    if capture.buffers is not None and capture.buffers_before is not None:
        wrong = Intake(capture.buffers_before).refuse(capture.buffers)
    return f"buffers {wrong}" if wrong else None


def _alone_wrong(row: Any) -> str | None:
    """What is wrong with tensors by name that there is nothing to compare with."""
    return Intake(row if isinstance(row, Mapping) else {}, longest=math.inf).refuse(row)


def _numbers_wrong(capture: Capture) -> str | None:
    """What is wrong with the plain fields, if anything."""
    if capture.client < 0 or capture.round < 1 or capture.steps < 1:
        return f"client {capture.client}, round {capture.round}, steps {capture.steps}: counted from 0, 1 and 1"
    if capture.kind == "gradient" and capture.steps != 1:
        return f"a gradient is of 1 step, not of {capture.steps}"
    for name, values in (("lr", capture.lr), ("batch_sizes", capture.batch_sizes)):
        if len(values) != capture.steps:
            return f"{name} needs one value per step: {capture.steps}, not {len(values)}"
        if not all(math.isfinite(value) and value > 0 for value in values):
            return f"{name} must be positive (got {list(values)!s:.80})"
    if not 0 <= capture.momentum < 1:
        return f"momentum must be at least 0 and below 1 (got {capture.momentum})"
    if not math.isfinite(step_weight(capture.lr, capture.momentum)):
        return f"lr is too large (got {list(capture.lr)!s:.80})"
    return None


def _fits(row: Mapping[str, Tensor], model: Mapping[str, Tensor], what: str, *, complete: bool) -> str | None:
    for name, tensor in row.items():
        if name not in model:
            return f"it has no trained {what} '{name}'" if complete else f"it has no {what} '{name}'"
        if tensor.shape != model[name].shape:
            return f"{name} is {tuple(tensor.shape)} in the update and {tuple(model[name].shape)} in the model"
        if tensor.dtype != model[name].dtype:
            return f"{name} is {tensor.dtype} in the update and {model[name].dtype} in the model"
    missing = [name for name in model if name not in row]
    return f"{what} '{missing[0]}' is not in the update" if complete and missing else None


def _spread(name: str, inputs: Inputs) -> dict[str, Tensor]:
    return {name: inputs} if isinstance(inputs, Tensor) else prefixed(name, inputs)


def _gathered(group: dict[str, Tensor]) -> Inputs:
    return group.get("", group)
