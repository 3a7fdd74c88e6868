"""How a matching attack descends. All victims are stacked and independent of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Never, Protocol

import torch
from torch import Tensor

from fedveil.attacks.candidate import Variables
from fedveil.attacks.lbfgs import StackedLBFGS
from fedveil.attacks.rest import Rest, RestOverSteps
from fedveil.streams import Streams
from fedveil.tree import Tree, at_least_single, per_client

if TYPE_CHECKING:
    from fedveil.attacks.embedding_space import EmbeddingSpace

LABELS = "labels"  # the variables of labels that are optimized with the inputs: never signed


def _no_more(_: object) -> Never:
    raise NotImplementedError("this descent offers its optimizer nothing but slopes")


@dataclass(frozen=True, eq=False)
class Descent:
    """What an optimizer sees of an attack."""

    evaluate: Callable[[Variables], tuple[Variables, Tensor]]  # the gradient of every victim's objective, and its cost
    project: Callable[[Variables], None]  # in place
    before: Callable[[Tensor], None]  # is told the costs that a step starts from
    after: Callable[[Variables], None]  # is told what a step ends with
    total: Callable[[], Tensor]  # every victim's objective, priors and all, as it was last evaluated
    streams: Streams | None = None  # one for each victim, for an optimizer that draws numbers
    labels: Tensor | None = None  # (V, B), for an optimizer that compares pictures; None where they are optimized
    fresh: Callable[[int], Variables] = _no_more  # the start of another number, for every victim
    totals: Callable[[Variables], Tensor] = _no_more  # objectives (V, K) at K variables of each (V, K, ...), unsloped
    text: EmbeddingSpace | None = None  # of sentences: how what is moved is read as tokens


class Optimizer(Protocol):
    """Makes every victim's objective small."""

    @property
    def evaluations(self) -> int:
        """Evaluations of the objective that one step takes."""
        ...

    def minimize(self, start: Variables, steps: int, descent: Descent) -> Variables:
        """The variables after so many steps."""
        ...


@dataclass(frozen=True)
class Adam:
    """Adam, on the gradient or on its sign."""

    evaluations: ClassVar[int] = 1
    lr: float = 0.1
    signed: bool = True  # Adam sees the sign of the gradient only
    decay: bool = True  # the rate falls to a tenth at 3/8, 5/8 and 7/8 of the steps
    # A victim whose objective stays as it is for so many steps rests until the rate falls, if it does. None: never.
    patience: int | None = None

    def minimize(self, start: Variables, steps: int, descent: Descent) -> Variables:
        """Project after every step. A victim whose gradient is no longer finite rests where it is.

        What becomes of a victim does not depend on when others rest: steps that nobody makes are counted all the same.
        """
        variables = self.begun(start, descent)
        optimizer = torch.optim.Adam(list(variables.values()), lr=self.lr)
        marks = self._marks(steps)
        schedule = self.scheduled(optimizer, steps)
        rest, cost = Rest(self.patience), torch.empty(0)
        for step in range(steps):
            if step in marks:
                rest.wake()
            if rest.all:
                descent.before(cost)
                for state in optimizer.state.values():
                    state["step"] += 1
                schedule.step()
                descent.after(variables)
                continue
            gradients, cost = descent.evaluate(variables)
            descent.before(cost)
            resting = rest.see(descent.total())
            kept = _rows(optimizer, variables, resting) if resting.any() else []
            broken = ~Tree(gradients).isfinite()
            before = {name: variable[broken] for name, variable in variables.items()} if broken.any() else {}
            for name, variable in variables.items():
                gradient = gradients[name].sign() if self.signed and name != LABELS else gradients[name]
                variable.grad = gradient.masked_fill(per_client(broken, gradient), 0.0) if before else gradient
            optimizer.step()
            schedule.step()
            for name, old in before.items():
                variables[name][broken] = old
            descent.project(variables)
            for tensor, rows in kept:
                tensor[resting] = rows
            self.between(step, optimizer, variables, descent)
            descent.after(variables)
        return variables

    def begun(self, start: Variables, descent: Descent) -> Variables:
        """Where the first step is made from."""
        return dict(start)

    def scheduled(self, optimizer: torch.optim.Adam, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        """How the rate falls."""
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, self._marks(steps), gamma=0.1)

    def between(self, step: int, optimizer: torch.optim.Adam, variables: Variables, descent: Descent) -> None:
        """Change variables in place after a step, otherwise than along their slope."""

    def _marks(self, steps: int) -> list[int]:
        return [steps * part // 8 for part in (3, 5, 7)] if self.decay else []


def _rows(optimizer: torch.optim.Adam, variables: Variables, which: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Some victims' variables and what Adam remembers of them: each tensor with a copy of these rows."""
    remembered = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [(tensor, tensor[which].clone()) for tensor in (*variables.values(), *remembered)]


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS without line search, 20 inner iterations a step. What it finds is projected at the end."""

    evaluations: ClassVar[int] = 20
    lr: float = 1.0
    scale: float = 1.0  # of costs on the way: L-BFGS takes curvatures and changes below 1e-10 and 1e-9 for none
    patience: int | None = None  # a victim whose objective stays as it is for so many steps rests; none: never

    def minimize(self, start: Variables, steps: int, descent: Descent) -> Variables:
        """A victim whose cost stops being finite goes back to its last finite point."""
        variables, tree = start, Tree(start)
        optimizer = StackedLBFGS(lr=self.lr)
        kind = tree.flat().dtype

        def at(point: Tensor) -> Variables:
            return dict(tree.unflat(point.to(kind)))

        point = at_least_single(tree.flat())  # half precision has no linear algebra
        cost, rest = torch.empty(0), RestOverSteps(self.patience, point[:, 0])

        def flat(point: Tensor) -> tuple[Tensor, Tensor]:
            gradients, cost = descent.evaluate(at(point))
            rest.see(at_least_single(descent.total()))
            slopes = at_least_single(Tree({name: gradients[name] for name in tree}).flat())
            return self.scale * at_least_single(cost), self.scale * slopes

        for _ in range(steps):
            if not rest.all:
                point, cost = optimizer.step(point, flat, rest.resting)
                rest.end_step()
                variables = at(point)
            descent.before(cost / self.scale)
            descent.after(variables)
        point = optimizer.settle(point, torch.isfinite(descent.evaluate(variables)[1]))
        variables = at(point)
        descent.project(variables)
        return variables
