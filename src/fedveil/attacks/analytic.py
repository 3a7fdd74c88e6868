"""The analytic attack: the inputs of a linear first layer, solved for from its gradient rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.attacks.base import Attack, Work
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.labels import last_linear, whole_counts
from fedveil.attacks.linear_inputs import (
    SLACK,
    Span,
    Valid,
    lone_differences,
    lone_rows,
    outside,
    recover_inputs,
    span_of,
    trusted_rows,
)
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import Public, Scene
from fedveil.attacks.single_targets import check_readable, single_targets
from fedveil.errors import FedveilError
from fedveil.fields import Count, declared
from fedveil.registry import attacks
from fedveil.tasks.layout import Layout

REPRODUCED = 0.03  # share of an input's own gradient that may lie outside the span of the update's: rounding, no more
UNSTEADY = 2  # units whose input is so near to zero that rounding may switch them: they are not counted
ALIKE = 0.25  # two solutions that differ by less, in parts of their norm, are one input
FINEST = 1e-13  # relative noise that the solution itself adds in double precision
MOST_ROWS = 128  # rows that are tried as inputs themselves
PROBES = 64  # inputs by which it is seen whether all examples act on the layer alike


@attacks.register("analytic")
@declared
class Analytic(Attack):
    """Solve for the inputs of a linear first layer with a bias. Exact, without optimization."""

    paper = (
        "Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, 2018 (single examples); "
        "Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning, 2024 (batches)"
    )
    modalities = ("pictures", "records")
    question = "reconstruct"
    revision = 2
    tries: Count = 2**16  # sets of gradient rows to invert at most, in the search for the inputs of one batch

    def check_model(self, model: nn.Module, layout: Layout) -> None:
        """Refuse a model without a linear layer that takes the input itself; before any long work."""
        input_layer(model, layout)

    def check(self, scene: Scene) -> None:
        """Refuse a scene with such a model."""
        self.check_model(scene.public.model, scene.public.layout)
        if scene.public.target.kind != "class":  # inputs are told apart by their classes; a single one need not be
            check_readable(Problem.of(scene.rows(slice(0, 1))))

    @property
    def labels_from(self) -> str:
        """Off the update, unless the scene has them."""
        return "recovered"

    def estimate(self, scene: Scene) -> Work:
        """A step for every victim; how long it takes depends on the search."""
        return Work(scene.count)

    def pieces(self, scene: Scene) -> list[Scene]:
        """Every victim is solved on its own."""
        return [scene.rows([victim]) for victim in range(scene.count)]

    def run(self, scene: Scene, fitted: object = None) -> Reconstruction:
        """Solve for every victim's batch, one after another."""
        start = time.perf_counter()
        solved = []
        for solution in solutions(scene, self.tries):
            solved.append(solution)
            if scene.bench.report:
                scene.bench.report(len(solved), scene.count)
        return Reconstruction(
            inputs=torch.stack([solution.inputs for solution in solved]).to(scene.like),
            labels=torch.stack([solution.labels for solution in solved]),
            cost=torch.tensor([solution.cost for solution in solved]).to(scene.like),
            seconds=time.perf_counter() - start,
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """The batch of one victim."""

    inputs: Tensor  # (B, ...)
    labels: Tensor  # (B,)
    reproduced: Tensor  # (B,) whether the model's gradient at this input is part of the update; if not, it is a guess
    cost: float  # the share of the rows that the reproduced inputs do not explain: 0 if all are exact, 1 if none is


def input_layer(model: nn.Module, layout: Layout) -> str:
    """The name of the trained linear layer with a bias that takes the flattened input itself, once in a pass."""
    example = torch.linspace(0.1, 0.9, torch.Size(layout.shape).numel())
    own = [*model.parameters(), *model.buffers()]
    floating = [tensor for tensor in own if tensor.is_floating_point()]
    example = example.to(floating[0]) if floating else example
    taken: dict[str, int] = {}

    def catch(name: str, value: Any) -> None:
        taken[name] = taken.get(name, 0) + (1 if torch.equal(value.flatten(), example) and value.dim() == 2 else 2)

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    handles = [
        module.register_forward_pre_hook(lambda module, arguments, name=name: catch(name, arguments[0]))
        for name, module in linear.items()
    ]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # batch norm moves them
    try:
        with torch.no_grad(), torch.random.fork_rng():
            functional_call(model, buffers, (example.reshape(1, *layout.shape),))
    except (TypeError, ValueError, RuntimeError, IndexError):  # it takes something else, or no single example
        taken.clear()
    finally:
        for handle in handles:
            handle.remove()
    for name, times in taken.items():
        layer = linear[name]
        if times == 1 and layer.bias is not None and layer.weight.requires_grad and layer.bias.requires_grad:
            return name
    raise FedveilError(
        "the analytic attack needs a trained linear layer with a bias that takes the input itself, and this model has "
        "none: use it on a model such as mlp, or another attack (inverting-gradients)"
    )


def solutions(scene: Scene, tries: int) -> Iterator[Solution]:
    """The batch of one victim after another."""
    layer = input_layer(scene.public.model, scene.public.layout)
    known = scene.knowledge()
    seeds = scene.streams.fold("analytic").key64().tolist()
    for victim, seed in enumerate(seeds):
        rows = _rows_of(known.target.row(victim), layer)
        if scene.updates.kind != "gradient":  # weight decay moved the weights too
            rows = rows - scene.updates.weight_decay * _rows_of(scene.updates.before.row(victim), layer)
        trust = _rows_of(known.weight.row(victim), layer)
        solver = _Solver(scene, Replay.of(scene, victim, layer), tries, torch.Generator().manual_seed(seed))
        labels = None if scene.labels is None else scene.labels[victim]
        if labels is None and scene.public.target.kind != "class":
            labels = single_targets(Problem.of(scene.rows([victim])))[0].double()
        yield solver.solve(rows, trust, labels, known.target.row(victim))


def _rows_of(tensors: Mapping[str, Tensor], layer: str) -> Tensor:
    """[W | b] of a layer, or of what belongs to each of its entries."""
    weight, bias = (tensors[f"{layer}.{part}".removeprefix(".")] for part in ("weight", "bias"))
    return torch.cat([weight, bias[:, None]], 1).double()


@dataclass(frozen=True, eq=False)
class Replay:
    """The model that one victim was sent, in double precision, and the layer that takes the input."""

    public: Public
    state: dict[str, Tensor]
    layer: str

    @classmethod
    def of(cls, scene: Scene, victim: int, layer: str) -> Replay:
        """That of one victim of a scene."""
        model = scene.public.model
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own |= scene.updates.before.row(victim) | scene.updates.buffers.row(victim)
        state = {name: tensor.detach().clone() for name, tensor in own.items()}
        return cls(scene.public, {n: t.double() if t.is_floating_point() else t for n, t in state.items()}, layer)

    def output(self, inputs: Tensor) -> Tensor:
        """What the model makes of flattened inputs (N, d)."""
        shaped = inputs.reshape(len(inputs), *self.public.layout.shape)
        return functional_call(self.public.model, self.state, (shaped,))  # type: ignore[no-any-return]

    def effects(self, example: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the layer's bias for one example (d,) with each of the targets: shape (P, n)."""
        caught: list[Tensor] = []

        def catch(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            caught.append(output.detach().requires_grad_())
            return caught[0]

        handle = self.public.model.get_submodule(self.layer).register_forward_hook(catch)
        try:
            with torch.enable_grad():
                loss = self.public.loss(self.output(example.expand(len(targets), -1)), targets)
            found: Tensor = torch.autograd.grad(loss, caught[0])[0] * len(targets)
        finally:
            handle.remove()
        return found

    def profile(self, label: Tensor, probes: Tensor) -> Tensor | None:
        """What the bias's gradient of every example is a multiple of, on the units that it activates: (n,).

        None where examples differ in more, as with more than two classes, or where a unit is never active.

        label: any one (1,). probes: inputs (K, d).
        """
        effects = torch.cat([self.effects(probe, label) for probe in probes])  # (K, n)
        active = effects != 0
        first = int(active.sum(1).argmax())
        found = torch.where(active[first], effects[first], torch.nan)
        for _ in range(2):
            sizes = (effects / found).masked_fill(~active, torch.nan).nanmedian(1).values
            found = (effects / sizes[:, None]).masked_fill(~active, torch.nan).nanmedian(0).values
        off = (effects - sizes[:, None] * found).abs().masked_fill(~active, 0.0)
        alike = bool((off <= REPRODUCED * (sizes[:, None] * found).abs()).masked_fill(~active, True).all())
        return found if alike and bool(torch.isfinite(found).all()) else None

    def misfits(self, inputs: Tensor, targets: Tensor, basis: Tensor) -> Tensor:
        """For inputs (K, d) with each target, the share of the bias's gradient outside of a basis (n, r): (K, P).

        The true δ_b are in the span of the update's columns. A wrong input activates other units, and its gradient
        is not: this check needs none of the other inputs, and nothing but the input's own label fits.
        """
        found = []
        for example in inputs:
            effects = self.effects(example, targets)
            off = (effects - (effects @ basis) @ basis.T).square().sort(1).values
            size = effects.norm(dim=1)
            off = off[:, : off.shape[1] - min(UNSTEADY, off.shape[1] // 8)].sum(1).sqrt() / size.clamp_min(1e-300)
            found.append(torch.where(size > 0, torch.nan_to_num(off, nan=1.0), 1.0))
        return torch.stack(found) if found else inputs.new_zeros(0, len(targets))


@dataclass(frozen=True, eq=False)
class _Solver:
    """What solving for one batch needs beside its rows."""

    scene: Scene
    replay: Replay
    tries: int
    generator: torch.Generator

    def solve(self, rows: Tensor, trust: Tensor, labels: Tensor | None, target: Mapping[str, Tensor]) -> Solution:
        """The batch behind gradient rows (n, d + 1)."""
        size = self.scene.batch_size
        precision = max(torch.finfo(self.scene.like.dtype).eps, FINEST)
        trust = torch.where(torch.isfinite(rows), trust, 0.0)
        rows = torch.where(trust > 0, rows, 0.0)
        mixture = _mixture(rows, trust)
        if bool((trust != trust[0, 0]).any()):
            rows, precision = trusted_rows(rows, trust, size, precision)
        span = span_of(rows, size, precision)
        basis = torch.linalg.qr(span.spread[:, None] * span.left).Q
        options = self._options(labels).to(rows.device)
        sure, guesses = self._inputs(rows, span, lambda inputs: self.replay.misfits(inputs, options, basis).amin(1))
        if len(sure) == span.rank < size:
            sure = self._repeated(rows, sure, options, basis)
        inputs = torch.cat([sure, guesses, mixture.expand(size, -1)])[:size]
        reproduced = torch.arange(size, device=rows.device) < len(sure)
        misfits = self.replay.misfits(inputs, options, basis)
        layout, box = self.scene.public.layout, self._box()
        valid = inputs if box is None else inputs.clamp(box.low, box.high)
        return Solution(
            inputs=layout.settled(valid.reshape(size, *layout.shape)),
            labels=self._labels(inputs, reproduced, misfits, target) if labels is None else _matched(misfits, labels),
            reproduced=reproduced,
            cost=unexplained(rows, sure),
        )

    def _inputs(self, rows: Tensor, span: Span, misfit: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The inputs that the model reproduces, and guesses at others."""
        box = self._box()
        found = recover_inputs(span, box, self.tries, self.generator)
        misfits = misfit(found.inputs)
        candidates, rest = found.inputs, found.inputs[misfits >= REPRODUCED]
        if len(rest) and span.rank > 1:  # some rows may still show an input each
            shown = lone_rows(rows, box)[:MOST_ROWS]
            profile = self._profile(rows)
            if profile is not None:
                shown = torch.cat([shown, lone_differences(rows, profile, box, self.generator)])
            candidates, misfits = torch.cat([candidates, shown]), torch.cat([misfits, misfit(shown)])
            valid = [found.complete and outside(example, box) < SLACK for example in rest]
            rest = rest[torch.tensor(valid, dtype=torch.bool, device=rest.device)]
        best_first = misfits.argsort(stable=True)[: int((misfits < REPRODUCED).sum())]
        return _distinct(candidates[best_first])[: span.rank], rest

    def _profile(self, rows: Tensor) -> Tensor | None:
        """That of a model of two classes, as `Replay.profile` sees it at random inputs."""
        if self.scene.public.classes != 2:
            return None
        probes = torch.randn(PROBES, rows.shape[1] - 1, generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
        return self.replay.profile(torch.zeros(1, dtype=torch.int64, device=rows.device), probes.to(rows.device))

    def _repeated(self, rows: Tensor, inputs: Tensor, options: Tensor, basis: Tensor) -> Tensor:
        """Inputs as often as they are in the batch, told by how strong each one's part of the update is."""
        best = self.replay.misfits(inputs, options, basis).argmin(1)
        pairs = zip(inputs, options[best], strict=True)
        effects = torch.cat([self.replay.effects(example, label[None]) for example, label in pairs])
        strength = (_shares(rows, inputs) * effects).sum(1) / effects.square().sum(1)
        counts = (strength * self.scene.batch_size / strength.sum()).round().clamp_min(1).long()
        exact = int(counts.sum()) == self.scene.batch_size
        return inputs.repeat_interleave(counts, 0) if exact else inputs

    def _labels(self, inputs: Tensor, reproduced: Tensor, misfits: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        """The label with which each input is reproduced; for the others what the last layer's bias leaves over."""
        labels = misfits.argmin(1)
        last = f"{last_linear(self.scene.public.model, self.scene.public.classes)}.bias".removeprefix(".")
        if bool(reproduced.all()) or last not in target:
            return labels
        with torch.no_grad():
            softmax = self.replay.output(inputs).softmax(-1).mean(0)
        gradient = target[last].double()
        left = whole_counts(len(inputs) * (softmax - gradient), gradient < 0, len(inputs)).tolist()
        for label in labels[reproduced].tolist():
            left.remove(label if label in left else left[-1])
        labels[~reproduced] = torch.tensor(left, device=labels.device)
        return labels

    def _options(self, labels: Tensor | None) -> Tensor:
        if labels is not None:
            return labels
        public = self.scene.public
        layer = public.model.get_submodule(last_linear(public.model, public.classes))
        return torch.arange(int(layer.out_features))  # type: ignore[arg-type]

    def _box(self) -> Valid | None:
        layout = self.scene.public.layout
        if layout.box is None:
            return None
        low, high = (bound.double().expand(layout.shape).flatten() for bound in layout.box)
        if layout.columns is None:
            return Valid(low, high)
        whole = torch.zeros_like(low, dtype=torch.bool)
        for start, stop in layout.columns.blocks:
            whole[start:stop] = True
        return Valid(low, high, whole)


def unexplained(rows: Tensor, inputs: Tensor) -> float:
    """The share of gradient rows outside the span of inputs (K, d): 1 for no inputs or no gradient."""
    if not len(inputs) or not bool(rows.any()):
        return 1.0
    extended = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    return float((rows - _shares(rows, inputs).T @ extended).norm() / rows.norm())


def _shares(rows: Tensor, inputs: Tensor) -> Tensor:
    """The vectors δ (K, n) with which inputs make up the rows, by least squares."""
    extended = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    shares: Tensor = torch.linalg.pinv(extended.T) @ rows.T
    return shares


def _mixture(rows: Tensor, trust: Tensor) -> Tensor:
    """One mean input for all rows (d,), weighted by their bias gradients; 0 where nothing is known."""
    weight = trust[:, :-1] * trust[:, -1:]
    bias = rows[:, -1:]
    return (weight * bias * rows[:, :-1]).sum(0) / (weight * bias.square()).sum(0).clamp_min(1e-300)


def _distinct(inputs: Tensor) -> Tensor:
    """The first of inputs that are alike."""
    kept: list[Tensor] = []
    for example in inputs:
        if all(float((example - other).norm()) > ALIKE * float(other.norm()) for other in kept):
            kept.append(example)
    return torch.stack(kept) if kept else inputs


def _matched(misfits: Tensor, labels: Tensor) -> Tensor:
    """The given labels in the order of the inputs (B of them) that they fit best: misfits is (B, B)."""
    order = linear_sum_assignment(misfits.cpu().numpy())[1]
    return labels[torch.from_numpy(order).to(labels.device)]
