"""Whether compiling an attack is worth it, predicted from its arithmetic.

Predicted and not timed: a busy machine would choose otherwise than an idle one, and the last bits of a result, which an
attack amplifies, depend on the backend. The same attack always runs the same way.
"""

from __future__ import annotations

from fedveil.attacks.problem import Problem
from fedveil.clients.choose import COMPILE_SECONDS, COMPILED_SAVES, counted_operations

# Measured on one core with a small convolutional net: an evaluation of the objective, which differentiates the model
# twice, costs about eight forward passes.
PASSES = 8
OPERATIONS_PER_SECOND = 8e9
CALL_SECONDS = 2e-3


def worth_compiling(problem: Problem, evaluations: int, chunk: int) -> bool:
    """Whether compiling would save clearly more time than it takes, over so many evaluations of chunks of victims."""
    return predicted_seconds(problem, evaluations, chunk) * COMPILED_SAVES > 2 * COMPILE_SECONDS


def predicted_seconds(problem: Problem, evaluations: int, chunk: int) -> float:
    """What so many evaluations take uncompiled on one core, about."""
    return evaluations * (CALL_SECONDS + chunk * PASSES * forward_operations(problem) / OPERATIONS_PER_SECOND)


def forward_operations(problem: Problem) -> int:
    """Floating-point operations of one forward pass over one victim's batch, over all its local steps."""
    inputs = problem.like.new_zeros(problem.batch_size, *problem.shape)
    operations = counted_operations(lambda: problem.output(0, inputs))
    steps = problem.local.steps if problem.local else 1 + max((b.steps for b in problem.before), default=0)
    return operations * steps
