"""The matching engine: move candidates until their update looks like the observed one.

All victims are stacked and independent. Target, weights and labels are inputs of one function, so that attackers who
differ in these alone share its compiled form.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.attacks.batch_norm import BatchNormStatistics
from fedveil.attacks.candidate import Found, Learned, Variables
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.grouped_convolutions import compile_stacked
from fedveil.attacks.labels import read_label, recover_labels
from fedveil.attacks.match import MATCHES
from fedveil.attacks.notes import Counter, Notes, better
from fedveil.attacks.optimizers import LABELS, Descent
from fedveil.attacks.ordering import arranged, found_orders, with_search
from fedveil.attacks.priors import Box
from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import LabelsFrom, Objective, Phase, Recipe
from fedveil.attacks.scene import Workbench
from fedveil.attacks.soft_targets import as_targets, check_searchable, fresh_targets, settled_targets
from fedveil.attacks.together import Together, leading
from fedveil.attacks.unrolled import after_steps, unrolled
from fedveil.attacks.without_dropout import dropout_off, without_dropout
from fedveil.attacks.workload import MOST_BYTES, MOST_VICTIMS, steps_in_all, victims_at_a_time, worth_compiling
from fedveil.clients.compiling import compiler_found
from fedveil.clients.engine import BACKENDS, Backend, Engine
from fedveil.clients.identity import code_of, identity
from fedveil.defenses.base import StepsBefore
from fedveil.errors import FedveilError, one_line, unknown_name
from fedveil.streams import Streams
from fedveil.tree import Tree, per_client
from fedveil.workers import pack

log = logging.getLogger("fedveil")

Tensors = dict[str, Tensor]


def match(
    problem: Problem, recipe: Recipe, bench: Workbench | None = None, counter: Counter | None = None
) -> Reconstruction:
    """Attack all victims of a problem, chunk by chunk. Tries are compared by their final cost without priors.

    counter: counts the steps of several calls together.
    """
    bench = bench or Workbench()
    if bench.backend not in BACKENDS:
        raise unknown_name("backend", bench.backend, BACKENDS)
    problem = replace(problem, model=without_dropout(problem.model))
    recipe = with_search(recipe, problem.local)
    best: Reconstruction | None = None
    # The fast attention kernels have no second derivative.
    with sdpa_kernel(SDPBackend.MATH), dropout_off(problem):
        problem = with_labels(problem, recipe.labels)
        supposed = problem.before or (None,)
        matchers = [matcher_for(problem, recipe, bench, each) for each in supposed]
        counter = counter or Counter(bench.report, steps_in_all(problem, recipe, bench.chunk))
        for number in range(len(recipe.tries) * len(matchers)):
            attempt, place = divmod(number, len(matchers))
            tried = matchers[place].run(problem, attempt, counter, bench.scratch)
            best = tried if best is None else better(best, tried)
    assert best is not None
    return best


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
        check_searchable(problem)
        return replace(problem, labels=None)
    return replace(problem, labels=read_label(problem) if labels == "idlg" else recover_labels(problem))


# ---- matchers that are kept -------------------------------------------------------------------------------

_KEPT = 4  # matchers whose compiled code is kept for the next attack of their form
_matchers: OrderedDict[str, Matcher] = OrderedDict()


def matcher_for(problem: Problem, recipe: Recipe, bench: Workbench, before: StepsBefore | None) -> Matcher:
    """A matcher for problems of this form: one that was compiled before, or a new one."""
    made = Matcher(problem, recipe, bench, before)
    if made.backend != "compiled":
        return made
    try:
        key = hashlib.sha256(pack((made.form, problem.model, problem.loss))).hexdigest()
    except FedveilError:  # a loss or a defense of the user's own that cannot be told from others by its bytes
        return made
    known = _matchers.setdefault(key, made)
    _matchers.move_to_end(key)
    while len(_matchers) > _KEPT:
        _matchers.popitem(last=False)
    return known


class Matcher:
    """One recipe on one model, ready to run on any number of victims."""

    def __init__(self, problem: Problem, recipe: Recipe, bench: Workbench, before: StepsBefore | None = None) -> None:
        self.recipe = recipe
        self._local = problem.local
        self._before = before
        self._kind = problem.form.kind
        self._one_model = problem.params.repeated or problem.count == 1
        # Numbers of large models take longer to read than to compute with. Only where all entries of each victim's
        # tensors have one weight is that left out.
        self._even = not recipe.reweighs and all(is_one_number(tensor) for tensor in problem.weight.values())
        self._engine = Engine(problem.model, problem.loss, backend="stacked")
        self.chunk = bench.chunk or victims_at_a_time(problem, recipe.seeds)
        self._functions: dict[tuple[bool, Objective, bool], Callable[..., Any]] = {}
        self.backend = self._choose(problem, bench.backend)
        # All that the compiled functions depend on, beside model and loss.
        shapes = {name: (tuple(t.shape[1:]), t.dtype) for name, t in problem.target.items()}
        learned = {name: (tuple(t.shape), t.dtype) for name, t in problem.learned.items()}
        targets = (problem.classes, problem.form, problem.labels is None)
        inputs = (problem.batch_size, problem.shape, targets, learned)
        self.form = repr((recipe, self._local, before, self._one_model, self._even, self.chunk, shapes, inputs))

    # ---- the objective of one victim -------------------------------------------------------------------

    def _objective(self, of: Objective, update_of: Callable[..., Tensors]) -> Callable[..., tuple[Tensor, Tensor]]:
        """A function of one victim's variables and what is fixed: cost with priors, and cost without."""
        compare = MATCHES[of.match].of

        def objective(
            variables: Variables,
            params: Tensors,
            buffers: Tensors,
            aim: Tensors,
            weight: Tensors,
            labels: Tensor,
            learned: Learned,
            box: Box | None,
            order: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            inputs = of.candidate.decode(variables, learned)
            chosen = as_targets(self._kind, variables[LABELS]) if LABELS in variables else labels
            matched = compare(update_of(params, buffers, inputs, chosen, order), aim, weight)
            own = of.candidate.cost(variables)
            total = matched if own is None else matched + own
            for prior in of.priors:
                if isinstance(prior, BatchNormStatistics):
                    total = total + prior(self._engine.model, params, buffers, inputs)
                else:
                    total = total + prior(inputs, box)
            return total, matched

        return objective

    def _loss(self, params: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        return self._engine.loss_of_one(params, buffers, inputs, labels)

    def _update(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor, order: Tensor | None = None
    ) -> Tensors:
        """What a client with these inputs would have shared, as a gradient."""
        return self._shared_update(grad(self._loss), order, params, buffers, inputs, labels)

    def _shared_update(self, gradient: Callable[..., Tensors], order: Tensor | None, *at: Any) -> Tensors:
        if self._local is not None:
            return unrolled(gradient, self._local, order, *at)
        if self._before is not None:
            return after_steps(gradient, self._before, *at)
        return gradient(*at)

    def _plain_update(
        self, params: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor, order: Tensor | None = None
    ) -> Tensors:
        """The same with plain autograd, for models that `torch.func` does not take."""

        def gradient(weights: Tensors, buffers: Tensors, inputs: Tensor, labels: Tensor) -> Tensors:
            live = {n: w if w.requires_grad else w.detach().requires_grad_() for n, w in weights.items()}
            loss = self._loss(live, buffers, inputs, labels)
            found = torch.autograd.grad(loss, list(live.values()), create_graph=True, allow_unused=True)
            return {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(live.items(), found, strict=True)}

        return self._shared_update(gradient, order, params, buffers, inputs, labels)

    # ---- the same for a chunk of victims ----------------------------------------------------------------

    def _evaluate(
        self, variables: Variables, fixed: tuple[Any, ...], of: Objective, backend: Backend | None = None
    ) -> tuple[Tensors, Tensor, Tensor]:
        """The gradient of every victim's objective in its variables, the costs without priors, and with them."""
        backend = backend or self.backend
        if backend == "loop":
            return self._looped(variables, fixed, of)
        compiled, ordered = backend == "compiled", fixed[-1] is not None
        if (compiled, of, ordered) not in self._functions:
            shared = None if self._one_model else 0
            objective = self._objective(of, self._update)
            stacked = vmap(
                grad_and_value(objective, has_aux=True),
                in_dims=(0, shared, 0, 0, 0, 0, None, None, 0 if ordered else None),
            )
            at = (variables, *fixed)
            model = self._engine.model
            made = compile_stacked(stacked, at, model, self._identity(of, at)) if compiled else stacked
            self._functions[compiled, of, ordered] = made
        gradients, (total, matched) = self._functions[compiled, of, ordered](variables, *fixed)
        return gradients, matched, total

    def _totals(self, variables: Variables, fixed: tuple[Any, ...], of: Objective) -> Tensor:
        """The objectives (V, K) at K variables of every victim, (V, K, ...) each: no slopes, and never compiled."""
        if self.backend == "loop":
            return self._looped_totals(variables, fixed, of)
        shared, ordered = None if self._one_model else 0, 0 if fixed[-1] is not None else None
        objective = self._objective(of, self._update)
        alone = vmap(lambda *at: objective(*at)[0], in_dims=(0, *[None] * 8), chunk_size=self._tries_at_once(variables))
        stacked = vmap(alone, in_dims=(0, shared, 0, 0, 0, 0, None, None, ordered))
        with torch.no_grad():
            found: Tensor = stacked(variables, *fixed)
        return found

    def _looped_totals(self, variables: Variables, fixed: tuple[Any, ...], of: Objective) -> Tensor:
        tries = next(iter(variables.values())).shape[1]
        columns = [
            self._looped({name: tensor[:, k] for name, tensor in variables.items()}, fixed, of)[2] for k in range(tries)
        ]
        return torch.stack(columns, 1)

    def _tries_at_once(self, variables: Variables) -> int:
        """How many tries of each victim have room beside each other."""
        count = len(next(iter(variables.values())))
        size = sum(p.numel() * p.element_size() for p in self._engine.parts.parameters.values())
        return max(1, min(MOST_VICTIMS, MOST_BYTES // max(size, 1)) // count)

    def _identity(self, of: Objective, at: tuple[Any, ...]) -> str | None:
        """What the objective of stacked victims depends on, beside its arguments; None where that cannot be told."""
        model, given = self._engine.model, {*at[1], *at[2]}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own = (self._local, self._before, self._kind, self._one_model)
        told = [code_of("fedveil.clients", "fedveil.attacks"), of, *own, model, self._engine.loss_function]
        return identity(told, {name: tensor for name, tensor in tensors.items() if name in given})

    def _looped(self, variables: Variables, fixed: tuple[Any, ...], of: Objective) -> tuple[Tensors, Tensor, Tensor]:
        params, buffers, aim, weight, labels, learned, box, order = fixed
        objective = self._objective(of, self._plain_update)
        gradients, costs, totals = [], [], []
        for v in range(len(labels)):
            live = {name: tensor[v].detach().requires_grad_() for name, tensor in variables.items()}
            own = params if self._one_model else {n: t[v] for n, t in params.items()}
            buffer, goal, trust = ({n: t[v] for n, t in part.items()} for part in (buffers, aim, weight))
            walk = None if order is None else order[v]
            total, matched = objective(live, own, buffer, goal, trust, labels[v], learned, box, walk)
            found = torch.autograd.grad(total, list(live.values()))
            gradients.append(dict(zip(live, found, strict=True)))
            costs.append(matched.detach())
            totals.append(total.detach())
        return dict(Tree.stack(gradients)), torch.stack(costs), torch.stack(totals)

    # ---- running ----------------------------------------------------------------------------------------

    def run(self, problem: Problem, attempt: int, counter: Counter, scratch: Path | None = None) -> Reconstruction:
        """One try for every victim, chunk by chunk; the last chunk is filled with dummy victims."""
        parts = []
        for start in range(0, problem.count, self.chunk):
            index = list(range(start, min(start + self.chunk, problem.count)))
            fill = index + [start] * (self.chunk - len(index) if self.backend == "compiled" else 0)
            done = self._chunk(problem.rows(fill), attempt, counter, scratch)
            parts.append(done if len(fill) == len(index) else done.rows(slice(0, len(index))))
        return parts[0] if len(parts) == 1 else Reconstruction.concat(parts)

    def _fixed(self, problem: Problem, of: Objective) -> tuple[Any, ...]:
        """What does not change over a phase: a row for every search."""
        problem = each_several_times(problem, of.seeds)
        params = problem.params.row(0) if self._one_model else dict(problem.params)
        labels = problem.labels
        if labels is None:  # optimized: the function still takes some
            labels = problem.form.zeros(problem.count, problem.batch_size, device=problem.like.device)
        weight = {name: one_number(t) if self._even else t.contiguous() for name, t in problem.weight.items()}
        with torch.no_grad():
            aim = vmap(MATCHES[of.match].aim)(dict(problem.target), weight)
        parts = (params, dict(problem.buffers), aim, weight)
        # Weights of a live model would drag its autograd along.
        return (
            *({name: tensor.detach() for name, tensor in part.items()} for part in parts),
            labels,
            problem.learned,
            problem.box,
            problem.order,
        )

    def _start(self, problem: Problem, attempt: int, of: Objective, found: Found | None = None) -> Variables:
        streams = problem.streams.fold("start", attempt)
        if of.seeds == 1:
            return self._start_one(problem, streams, of, found)
        each = [self._start_one(problem, streams.fold("seed", seed), of, found) for seed in range(of.seeds)]
        return {name: torch.stack([one[name] for one in each], 1).flatten(0, 1) for name in each[0]}

    def _start_one(self, problem: Problem, streams: Streams, of: Objective, found: Found | None) -> Variables:
        variables = of.candidate.start(problem, streams, found)
        if problem.labels is None:
            variables[LABELS] = fresh_targets(problem, streams) if found is None else found.variables[LABELS]
        return variables

    def _decoded(self, variables: Variables, problem: Problem, of: Objective) -> Tensor:
        return vmap(of.candidate.decode, in_dims=(0, None))(variables, problem.learned)

    def _reweighed(self, problem: Problem, inputs: Tensor, variables: Variables) -> Problem:
        """The problem with the trust in each entry that the inputs found so far give it."""
        if problem.reweight is None:
            return problem
        return problem.reweighed(self._updates(problem, inputs, variables))

    def _updates(self, problem: Problem, inputs: Tensor, variables: Variables) -> Tree:
        """What clients with the inputs found so far would have shared, as gradients."""
        rows = []
        labels = as_targets(self._kind, variables[LABELS]) if problem.labels is None else problem.labels
        for v in range(problem.count):  # a few times in an attack: not worth a compiled function
            buffers = {name: buffer.clone() for name, buffer in problem.buffers.row(v).items()}
            order = None if problem.order is None else problem.order[v]
            made = self._plain_update(problem.params.row(v), buffers, inputs[v].detach(), labels[v], order)
            rows.append({name: tensor.detach() for name, tensor in made.items()})
        return Tree.stack(rows)

    def _chunk(self, problem: Problem, attempt: int, counter: Counter, scratch: Path | None) -> Reconstruction:
        begun = time.perf_counter()
        notes = Notes(self.recipe.steps, (problem.count, problem.batch_size, *problem.shape), scratch)
        found, cost = None, problem.like.new_full((problem.count,), torch.nan)
        for place, phase in enumerate(self.recipe.tries[attempt]):
            of = self.recipe.objective(phase)
            if phase.reweighs and found is not None:
                problem = self._reweighed(problem, *found)
            start = self._start(problem, attempt, of, found)
            if phase.reorders:
                update = self._plain_update if self.backend == "loop" else self._update
                at = found or Found(self._decoded(start, problem, of), start)
                labels = problem.labels
                if labels is None:
                    labels = as_targets(self._kind, at.variables[LABELS])
                order = found_orders(problem, at.inputs, labels, update, stacked=self.backend != "loop")
                problem = replace(problem, order=order)
            streams = problem.streams.fold("descent", attempt, place)
            found, cost = self._phase(problem, phase, start, streams, notes, counter)
        assert found is not None
        inputs = found.inputs
        labels = problem.labels
        if labels is None:
            labels = settled_targets(self._kind, found.variables[LABELS])
        notes.last(inputs)
        if problem.order is not None:  # hand them in as they stand in the first epoch: so they are replayed
            first = problem.order[:, 0]
            inputs, labels = arranged(inputs, first), arranged(labels, first)
            notes.arrange(first)
        return Reconstruction(
            inputs=inputs,
            labels=labels,
            cost=cost,
            seconds=time.perf_counter() - begun,
            steps=notes.steps,
            costs=torch.stack(notes.costs, 1),
            iterates=notes.iterates,
        )

    def _phase(
        self, problem: Problem, phase: Phase, start: Variables, streams: Streams, notes: Notes, counter: Counter
    ) -> tuple[Found, Tensor]:
        """What one phase comes to, and the final costs without priors."""
        of = self.recipe.objective(phase)
        fixed = self._fixed(problem, of)

        total = torch.empty(0)

        def evaluate(at: Variables) -> tuple[Tensors, Tensor]:
            nonlocal total
            gradients, matched, total = self._evaluate(at, fixed, of)
            return gradients, matched

        leaders = torch.arange(problem.count, device=problem.like.device)  # rows: of several searches, the best so far

        def before_step(costs: Tensor) -> None:
            nonlocal leaders
            if of.seeds > 1:
                first = torch.arange(0, len(costs), of.seeds, device=costs.device)
                leaders = first + leading(costs.reshape(-1, of.seeds))
            notes.before(costs[leaders])

        def after(at: Variables) -> None:
            if notes.wanted:
                notes.after(self._decoded(at, problem, of)[leaders])
            counter.add()

        def project(at: Variables) -> None:
            of.candidate.project(at, problem)

        def fresh(number: int) -> Variables:
            return of.candidate.start(problem, streams.fold("start", number))

        def totals(at: Variables) -> Tensor:
            return self._totals(at, fixed, of)

        descent = Descent(
            evaluate, project, before_step, after, lambda: total, streams, problem.labels, fresh, totals, problem.text
        )
        before = {name: tensor.clone() for name, tensor in start.items()} if phase.accepts is not None else {}
        variables = phase.optimizer.minimize(start, phase.steps, descent)
        cost = evaluate(variables)[1]
        if phase.accepts is not None and not bool((cost < phase.accepts).all()):
            fits = cost < phase.accepts
            variables = {n: torch.where(per_client(fits, t), t, before[n]) for n, t in variables.items()}
            cost = evaluate(variables)[1]
        if isinstance(phase.optimizer, Together) and of.seeds > 1:
            variables, cost = phase.optimizer.settled(variables, cost, descent)
        return Found(self._decoded(variables, problem, of), variables), cost

    # ---- the backend --------------------------------------------------------------------------------------

    def _choose(self, problem: Problem, backend: Backend) -> Backend:
        """A forced backend, or the fastest that this model takes and that is worth it here."""
        if backend == "loop":
            return "loop"
        some = problem.rows(slice(0, min(self.chunk, problem.count)))
        try:
            found = None
            for phase in self.recipe.tries[0]:
                of = self.recipe.objective(phase)
                at = self._start(some, 0, of, found)
                self._evaluate(at, self._fixed(some, of), of, backend="stacked")
                at = {name: tensor[:: of.seeds] for name, tensor in at.items()}
                found = Found(self._decoded(at, some, of), at)
        except Exception as error:  # whatever a foreign module raises under vmap is the reason
            reason = one_line(error)
            if backend != "auto":
                raise FedveilError(f"this attack cannot run on the backend '{backend}': {reason}; use loop") from None
            log.info("the attack runs on the loop backend: %s", reason)
            return "loop"
        if problem.text is not None:  # sentences of every length would be compiled for
            return "stacked"
        if backend != "auto":
            return "compiled" if backend == "compiled" and compiler_found() else "stacked"
        own = replace(problem, before=())  # each supposed history has a matcher of its own
        return "compiled" if worth_compiling(own, self.recipe, self.chunk) and compiler_found() else "stacked"


def each_several_times(problem: Problem, times: int) -> Problem:
    """The problem with every victim as often as it is searched for."""
    if times == 1:
        return problem
    return problem.rows([victim for victim in range(problem.count) for _ in range(times)])


def is_one_number(tensor: Tensor) -> bool:
    """Whether each victim has one number, expanded over all entries."""
    return all(stride == 0 or length == 1 for stride, length in zip(tensor.stride()[1:], tensor.shape[1:], strict=True))


def one_number(tensor: Tensor) -> Tensor:
    """That number of each victim, in as many dimensions."""
    return tensor[(slice(None), *[slice(0, 1)] * (tensor.dim() - 1))].contiguous()
