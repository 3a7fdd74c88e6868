"""How much work a matching attack is, predicted from its arithmetic, and whether compiling it is worth it.

Predicted and not timed: a busy machine would choose otherwise than an idle one, and the last bits of a result, which an
attack amplifies, depend on the backend. Nor does the choice depend on what else is attacked: the same victims under the
same recipe always run the same way.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from fedveil.attacks.problem import Problem
from fedveil.attacks.recipe import Recipe
from fedveil.clients.choose import Speed, counted_operations, estimated_seconds
from fedveil.tree import size_in_bytes

MOST_VICTIMS = 32  # stacked at a time
# Stacked gradients of large models, beyond this, cost more than stacking saves: ResNet-18 takes twice as long.
MOST_BYTES = 64 * 2**20
# Measured on one core with a small convolutional net: an evaluation of the objective, which differentiates the model
# twice, costs about eight forward passes.
PASSES = 8
SPEED = Speed(8e9, 2e-3)
# Layers of many channels or pixels keep a core busier: ResNet-18 on 224 pixels, 3.6e9 operations, runs ten times as
# fast. By the speed of small nets 30 steps of it looked long enough to compile, which takes as long as 300 of them.
LARGE = 2e9  # operations of a forward pass
LARGE_SPEED = Speed(8e10, 2e-3)
COMPILE_SECONDS = 30.0  # of one objective
LARGE_COMPILE_SECONDS = 110.0
COMPILED_SAVES = 0.5  # share of the stacked time
# Chunks of victims that compiled code usually serves: an audit attacks the same victims in four roles.
SERVED = 4
# Counted once for each model and form of its inputs.
_OPERATIONS: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = WeakKeyDictionary()


def victims_at_a_time(problem: Problem, seeds: int = 1) -> int:
    """How many victims to stack, with so many searches for each."""
    size = size_in_bytes(problem.target.row(0).values())
    return max(1, min(min(MOST_VICTIMS, MOST_BYTES // max(size, 1)) // seeds, problem.count))


def chunks(problem: Problem, recipe: Recipe, chunk: int | None) -> int:
    """The number of stacks of victims."""
    return -(-problem.count // (chunk or victims_at_a_time(problem, recipe.seeds)))


def steps_in_all(problem: Problem, recipe: Recipe, chunk: int | None = None) -> int:
    """The steps of an attack over all its tries and chunks of victims."""
    return recipe.steps * len(recipe.tries) * max(len(problem.before), 1) * chunks(problem, recipe, chunk)


def worth_compiling(problem: Problem, recipe: Recipe, chunk: int) -> bool:
    """Whether compiling would save clearly more time than it takes."""
    each = COMPILE_SECONDS if forward_operations(problem) < LARGE else LARGE_COMPILE_SECONDS
    compiling = each * len(recipe.objectives)
    return SERVED * chunk_seconds(problem, recipe, chunk) * COMPILED_SAVES > 2 * compiling


def attack_seconds(problem: Problem, recipe: Recipe, chunk: int | None = None) -> float:
    """Estimated seconds of an attack, uncompiled, on one core."""
    size = chunk or victims_at_a_time(problem, recipe.seeds)
    histories = max(len(problem.before), 1)  # each that is supposed is tried
    return histories * chunks(problem, recipe, chunk) * chunk_seconds(problem, recipe, size)


def chunk_seconds(problem: Problem, recipe: Recipe, chunk: int) -> float:
    """Estimated seconds for one chunk of victims, uncompiled, on one core."""
    forward = forward_operations(problem)
    speed = SPEED if forward < LARGE else LARGE_SPEED
    phases = [phase for phases in recipe.tries for phase in phases]
    calls = [phase.steps * phase.optimizer.evaluations for phase in phases]
    parts = zip(phases, calls, strict=True)
    return sum(estimated_seconds(chunk * PASSES * forward * phase.seeds, count, speed) for phase, count in parts)


def forward_operations(problem: Problem) -> int:
    """Floating-point operations of one forward pass over one victim's batch, over all its local steps."""
    known = _OPERATIONS.setdefault(problem.model, {})
    form = (problem.batch_size, *problem.shape)
    if form not in known:
        known[form] = counted_operations(lambda: problem.output(0, problem.like.new_zeros(form)))
    operations = known[form]
    steps = problem.local.steps if problem.local else 1 + max((b.steps for b in problem.before), default=0)
    return operations * steps
