"""The matching engine: optimize candidate inputs until their update looks like the observed one.

Every optimization attack is one choice of what is optimized, the cost, the priors, the optimizer, the labels and the
restarts. All victims are stacked and independent. Target, weights and labels are inputs of one function, so that the
naive and the adaptive attacker, the floor and the ceiling share its compiled form.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.attacks.costs import COSTS, CostName
from fedveil.attacks.effort import predicted_seconds, worth_compiling
from fedveil.attacks.labels import read_label, recover_labels
from fedveil.attacks.lbfgs import StackedLBFGS
from fedveil.attacks.narrow import compile_stacked
from fedveil.attacks.priors import mean_square, total_variation
from fedveil.attacks.problem import Problem, Reconstruction
from fedveil.attacks.quiet import quiet, without_dropout
from fedveil.attacks.tracking import Counter, Notes, Progress, better
from fedveil.attacks.unrolled import after_steps, unrolled
from fedveil.clients.compiling import compiler_found
from fedveil.clients.engine import BACKENDS, Backend, Engine
from fedveil.defenses.base import StepsBefore
from fedveil.errors import FedveilError, unknown_name
from fedveil.tree import Tree, per_client, size_in_bytes

log = logging.getLogger("fedveil")

LabelsFrom = Literal["known", "idlg", "recovered", "optimized"]
Row = dict[str, Tensor]

MOST_VICTIMS = 32  # stacked at a time
# Stacked gradients of large models, beyond this, cost more than stacking saves: ResNet-18 takes twice as long.
MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Matching:
    """The choices that make an attack. See the named attacks for the published ones."""

    cost: CostName = "cosine"
    steps: int = 1600
    optimizer: Literal["adam", "lbfgs"] = "adam"
    lr: float = 0.1
    signed: bool = True  # Adam sees the sign of the input gradient only
    alternate: bool = False  # of several tries, every second one turns `signed` round
    decay: bool = True  # the rate falls to a tenth at 3/8, 5/8 and 7/8 of the steps
    boxed: bool = True  # inputs are clamped to valid pixels after every step
    total_variation: float = 0.0
    mean_square: float = 0.0
    labels: LabelsFrom = "known"
    start: Literal["normal", "uniform"] = "normal"  # of the inputs; uniform over the valid box
    restarts: int = 1


def match(
    problem: Problem,
    choices: Matching,
    *,
    backend: Backend = "auto",
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Reconstruction:
    """Run an attack on all victims of a problem. Restarts are compared by their final cost without priors."""
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    problem = replace(problem, model=quiet(problem.model))
    best: Reconstruction | None = None
    # The fast attention kernels have no second derivative.
    with sdpa_kernel(SDPBackend.MATH), without_dropout(problem):
        problem = with_labels(problem, choices.labels)
        supposed = problem.before or (None,)
        matchers = [Matcher(problem, choices, backend=backend, chunk=chunk, before=each) for each in supposed]
        tries = choices.restarts * len(matchers)
        report = Counter(progress, steps_in_all(problem, choices, chunk))
        for number in range(tries):
            restart, place = divmod(number, len(matchers))
            tried = matchers[place].run(problem, restart, report)
            best = tried if best is None else better(best, tried)
    assert best is not None
    return best


def steps_in_all(problem: Problem, choices: Matching, chunk: int | None = None) -> int:
    """The steps of an attack over all its tries and chunks of victims."""
    chunks = -(-problem.count // min(chunk or most_victims(problem), problem.count))
    return choices.steps * choices.restarts * max(len(problem.before), 1) * chunks


def evaluations(problem: Problem, choices: Matching, chunk: int | None = None) -> int:
    """How often the objective of a chunk of victims is evaluated, about."""
    return steps_in_all(problem, choices, chunk) * (20 if choices.optimizer == "lbfgs" else 1)


def most_victims(problem: Problem) -> int:
    """How many victims to stack at a time."""
    size = size_in_bytes(problem.target.row(0).values())
    return max(1, min(MOST_VICTIMS, MOST_BYTES // max(size, 1)))


def attack_seconds(problem: Problem, choices: Matching) -> float:
    """What an attack takes in one process, about."""
    chunk = min(most_victims(problem), problem.count)
    return predicted_seconds(problem, evaluations(problem, choices, chunk), chunk)


def with_labels(problem: Problem, labels: LabelsFrom) -> Problem:
    """The problem with the labels that the attack will use; None where they are optimized."""
    if labels == "known":
        if problem.labels is None:
            raise FedveilError(
                "the labels are not known here: let the attack read them off (--labels recovered, or idlg for a batch "
                "of one) or optimize them (--labels optimized)"
            )
        return problem
    if labels == "optimized":
        if problem.classes is None:
            raise FedveilError("labels cannot be optimized: the number of classes is not known")
        return replace(problem, labels=None)
    return replace(problem, labels=read_label(problem) if labels == "idlg" else recover_labels(problem))


class Matcher:
    """One attack on one model, ready to run on any number of victims."""

    def __init__(
        self,
        problem: Problem,
        choices: Matching,
        *,
        backend: Backend,
        chunk: int | None = None,
        before: StepsBefore | None = None,
    ) -> None:
        self.choices = choices
        self._cost = COSTS[choices.cost]
        self._simulate = problem.simulate
        self._local = problem.local
        self._before = before
        self._shared = problem.params.repeated or problem.count == 1
        # Numbers of large models take longer to read than to reckon with. Only where all victims have equal weights are
        # these left out: one function serves all.
        self._even = all(is_one_number(tensor) for tensor in problem.weight.values())
        self._engine = Engine(problem.model, problem.loss, backend="stacked")
        self.chunk = min(chunk or most_victims(problem), problem.count)
        self._functions: dict[bool, Callable[..., Any]] = {}
        self.backend = self._choose(problem, backend)

    # ---- the objective of one victim -------------------------------------------------------------------

    def _objective(
        self, variables: Row, params: Row, buffers: Row, aim: Row, weight: Row, labels: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cost with priors, and cost without."""
        return self._cost_of(self._update, variables, params, buffers, aim, weight, labels, noise)

    def _cost_of(
        self,
        update_of: Callable[..., Row],
        variables: Row,
        params: Row,
        buffers: Row,
        aim: Row,
        weight: Row,
        labels: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = variables["inputs"]
        seen = inputs
        for place, simulate in enumerate(self._simulate):
            seen = simulate(seen, noise[place])
        chosen = variables["labels"].softmax(-1) if "labels" in variables else labels
        matched = self._cost.of(update_of(params, buffers, seen, chosen), aim, weight)
        total = matched
        if self.choices.total_variation and inputs.dim() >= 3:
            total = total + self.choices.total_variation * total_variation(inputs)
        if self.choices.mean_square:
            total = total + self.choices.mean_square * mean_square(inputs)
        return total, matched

    def _loss(self, params: Row, buffers: Row, inputs: Tensor, labels: Tensor) -> Tensor:
        return self._engine.loss_of_one(params, buffers, inputs, labels)

    def _update(self, params: Row, buffers: Row, inputs: Tensor, labels: Tensor) -> Row:
        """What a client with these inputs would have shared, as a gradient."""
        return self._shared_update(grad(self._loss), params, buffers, inputs, labels)

    def _shared_update(self, gradient: Callable[..., Row], *at: Any) -> Row:
        if self._local is not None:
            return unrolled(gradient, self._local, *at)
        if self._before is not None:
            return after_steps(gradient, self._before, *at)
        return gradient(*at)

    def _plain_update(self, params: Row, buffers: Row, inputs: Tensor, labels: Tensor) -> Row:
        """The same with plain autograd, for models that `torch.func` does not take."""

        def gradient(weights: Row, buffers: Row, inputs: Tensor, labels: Tensor) -> Row:
            live = {n: w if w.requires_grad else w.detach().requires_grad_() for n, w in weights.items()}
            loss = self._loss(live, buffers, inputs, labels)
            found = torch.autograd.grad(loss, list(live.values()), create_graph=True, allow_unused=True)
            return {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(live.items(), found, strict=True)}

        return self._shared_update(gradient, params, buffers, inputs, labels)

    # ---- the same for a chunk of victims ----------------------------------------------------------------

    def _evaluate(self, variables: Row, fixed: tuple[Any, ...], backend: Backend | None = None) -> tuple[Row, Tensor]:
        """The gradient of every victim's objective in its variables, and the costs without priors."""
        backend = backend or self.backend
        if backend == "loop":
            return self._looped(variables, fixed)
        compiled = backend == "compiled"
        if compiled not in self._functions:
            shared = None if self._shared else 0
            stacked = vmap(grad(self._objective, has_aux=True), in_dims=(0, shared, 0, 0, 0, 0, 0))
            at = (variables, *fixed)
            self._functions[compiled] = compile_stacked(stacked, at, self._engine.model) if compiled else stacked
        return self._functions[compiled](variables, *fixed)  # type: ignore[no-any-return]

    def _looped(self, variables: Row, fixed: tuple[Any, ...]) -> tuple[Row, Tensor]:
        params, buffers, aim, weight, labels, noise = fixed
        gradients, costs = [], []
        for v in range(len(labels)):
            live = {name: tensor[v].detach().requires_grad_() for name, tensor in variables.items()}
            own = params if self._shared else {n: t[v] for n, t in params.items()}
            buffer, goal, trust = ({n: t[v] for n, t in part.items()} for part in (buffers, aim, weight))
            total, matched = self._cost_of(self._plain_update, live, own, buffer, goal, trust, labels[v], noise[v])
            found = torch.autograd.grad(total, list(live.values()))
            gradients.append(dict(zip(live, found, strict=True)))
            costs.append(matched.detach())
        return dict(Tree.stack(gradients)), torch.stack(costs)

    # ---- running ----------------------------------------------------------------------------------------

    def run(self, problem: Problem, restart: int, progress: Counter) -> Reconstruction:
        """One try for every victim, chunk by chunk; the last chunk is filled with dummy victims."""
        parts = []
        for start in range(0, problem.count, self.chunk):
            index = list(range(start, min(start + self.chunk, problem.count)))
            fill = index + [start] * (self.chunk - len(index) if self.backend == "compiled" else 0)
            done = self._chunk(problem.rows(fill), restart, progress)
            parts.append(done.rows(slice(0, len(index))))
        return Reconstruction.concat(parts)

    def _fixed(self, problem: Problem) -> tuple[Any, ...]:
        """What does not change while a chunk of victims is attacked."""
        params = problem.params.row(0) if self._shared else dict(problem.params)
        labels = problem.labels
        if labels is None:  # optimized: the function still takes some
            labels = torch.zeros(problem.count, problem.batch_size, dtype=torch.int64, device=problem.like.device)
        weight = {name: one_number(t) if self._even else t.contiguous() for name, t in problem.weight.items()}
        with torch.no_grad():
            aim = vmap(self._cost.aim)(dict(problem.target), weight)
        parts = (params, dict(problem.buffers), aim, weight)
        # Weights of a live model would drag its autograd along.
        return *({name: tensor.detach() for name, tensor in part.items()} for part in parts), labels

    def _start(self, problem: Problem, restart: int) -> Row:
        streams, like = problem.streams.fold("start", restart), problem.like
        shape = (problem.batch_size, *problem.shape)
        if self.choices.start == "normal" or problem.box is None:
            inputs = streams.normal(*shape).to(like)
        else:
            low, high = problem.box
            inputs = low + (high - low) * streams.uniform(*shape).to(like)
        variables = {"inputs": inputs}
        if problem.labels is None:
            assert problem.classes is not None
            variables["labels"] = streams.normal(problem.batch_size, problem.classes).to(like)
        return variables

    def _chunk(self, problem: Problem, restart: int, progress: Counter) -> Reconstruction:
        begun = time.perf_counter()
        variables = self._start(problem, restart)
        noise_streams = problem.streams.fold("noise", restart)
        shape = (len(self._simulate), *variables["inputs"].shape[1:])
        fixed, like = self._fixed(problem), problem.like
        no_noise = like.new_zeros(problem.count, 0)

        def evaluate(at: Row) -> tuple[Row, Tensor]:
            noise = noise_streams.normal(*shape).to(like) if self._simulate else no_noise
            return self._evaluate(at, (*fixed, noise))

        notes = Notes(self.choices.steps)
        signed = self.choices.signed != (self.choices.alternate and restart % 2 == 1)
        optimize = partial(self._adam, signed=signed) if self.choices.optimizer == "adam" else self._lbfgs
        variables, cost = optimize(variables, evaluate, problem, notes, progress)
        labels = problem.labels if problem.labels is not None else variables["labels"].argmax(-1)
        return Reconstruction(
            inputs=variables["inputs"],
            labels=labels,
            cost=cost,
            steps=notes.steps,
            costs=torch.stack(notes.costs, 1),
            iterates=torch.stack(notes.iterates),
            seconds=time.perf_counter() - begun,
        )

    def _adam(
        self,
        variables: Row,
        evaluate: Callable[[Row], tuple[Row, Tensor]],
        problem: Problem,
        notes: Notes,
        progress: Counter,
        *,
        signed: bool,
    ) -> tuple[Row, Tensor]:
        steps = self.choices.steps
        optimizer = torch.optim.Adam(list(variables.values()), lr=self.choices.lr)
        marks = [steps * part // 8 for part in (3, 5, 7)] if self.choices.decay else []
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, gamma=0.1)
        for step in range(1, steps + 1):
            gradients, cost = evaluate(variables)
            notes.before(step, cost)
            # A victim whose gradient is no longer finite rests where it is; the others go on.
            broken = ~Tree(gradients).isfinite()
            before = {name: variable[broken] for name, variable in variables.items()} if broken.any() else {}
            for name, variable in variables.items():
                gradient = gradients[name].sign() if signed and name == "inputs" else gradients[name]
                variable.grad = gradient.masked_fill(per_client(broken, gradient), 0.0) if before else gradient
            optimizer.step()
            schedule.step()
            for name, old in before.items():
                variables[name][broken] = old
            self._box(variables, problem)
            notes.after(step, variables["inputs"])
            progress.add()
        return variables, evaluate(variables)[1]

    def _lbfgs(
        self,
        variables: Row,
        evaluate: Callable[[Row], tuple[Row, Tensor]],
        problem: Problem,
        notes: Notes,
        progress: Counter,
    ) -> tuple[Row, Tensor]:
        tree = Tree(variables)
        optimizer = StackedLBFGS(lr=self.choices.lr)

        def flat(point: Tensor) -> tuple[Tensor, Tensor]:
            gradients, cost = evaluate(dict(tree.unflat(point)))
            return cost, Tree({name: gradients[name] for name in tree}).flat()

        point = tree.flat()
        for step in range(1, self.choices.steps + 1):
            point, cost = optimizer.step(point, flat)
            notes.before(step, cost)
            variables = dict(tree.unflat(point))
            notes.after(step, variables["inputs"])
            progress.add()
        point = optimizer.settle(point, torch.isfinite(evaluate(variables)[1]))
        variables = self._box(dict(tree.unflat(point)), problem)
        return variables, evaluate(variables)[1]

    def _box(self, variables: Row, problem: Problem) -> Row:
        if self.choices.boxed and problem.box is not None:
            low, high = problem.box
            variables["inputs"] = variables["inputs"].clamp_(low, high)
        return variables

    # ---- the backend --------------------------------------------------------------------------------------

    def _choose(self, problem: Problem, backend: Backend) -> Backend:
        """A forced backend, or the fastest that this model takes and that is worth it here."""
        if backend == "loop":
            return "loop"
        some = problem.rows(slice(0, self.chunk))
        noise = some.like.new_zeros(some.count, len(self._simulate), some.batch_size, *some.shape)
        arguments = (self._start(some, 0), (*self._fixed(some), noise))
        try:
            self._evaluate(*arguments, backend="stacked")
        except Exception as error:  # whatever a foreign module raises under vmap is the reason
            reason = str(error).strip().partition("\n")[0][:200]
            if backend != "auto":
                raise FedveilError(f"this attack cannot run on the backend '{backend}': {reason}; use loop") from None
            log.info("the attack runs on the loop backend: %s", reason)
            return "loop"
        if backend != "auto":
            return "compiled" if backend == "compiled" and compiler_found() else "stacked"
        own = replace(problem, before=())  # each supposed history has a matcher of its own
        worth = worth_compiling(own, evaluations(own, self.choices, self.chunk), self.chunk)
        return "compiled" if worth and compiler_found() else "stacked"


def is_one_number(tensor: Tensor) -> bool:
    """Whether each victim has one number, expanded over all entries."""
    return all(stride == 0 or length == 1 for stride, length in zip(tensor.stride()[1:], tensor.shape[1:], strict=True))


def one_number(tensor: Tensor) -> Tensor:
    """That number of each victim, in as many dimensions."""
    return tensor[(slice(None), *[slice(0, 1)] * (tensor.dim() - 1))].contiguous()
