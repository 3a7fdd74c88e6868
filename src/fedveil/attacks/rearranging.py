"""Adam that starts where it fits best and moves tokens on its way: the search of LAMP (Balunović et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.candidate import Variables
from fedveil.attacks.embedding_space import EmbeddingSpace
from fedveil.attacks.optimizers import Adam, Descent
from fedveil.attacks.token_moves import DRAWS, rearrangements

INPUTS = "inputs"
SHARE = 3 / 8  # of a step's work that it takes to look at a start or a move: no second derivative is needed


@dataclass(frozen=True)
class Rearranging(Adam):
    """Adam from the best of many starts. Every few steps the tokens may change their places.

    Of `moves` rearrangements that are drawn, each a move of one sentence, the one with the lowest objective is kept, if
    that is lower than with all tokens where they are. To the objective, `fluency` times what the language prior says of
    the nearest tokens is added: their mean negative log likelihood.
    """

    lr: float = 0.01
    signed: bool = False
    decay: bool = False  # not that of Adam for pictures; but:
    falls: float = 0.89  # the rate is multiplied by this
    falls_every: int = 50  # steps
    starts: int = 500
    every: int = 75  # steps from one look at moves to the next
    moves: int = 200  # rearrangements that are looked at together; 0: none
    fluency: float = 0.2

    @property
    def evaluations(self) -> int:  # type: ignore[override]
        """As many as the moves are worth in steps, besides."""
        return 1 + round(SHARE * self.moves / self.every)

    def begun(self, start: Variables, descent: Descent) -> Variables:
        """Of many starts the one that fits best, for every victim."""
        best = {name: tensor.clone() for name, tensor in start.items()}
        if self.starts < 2:
            return best
        lowest = _finite(descent.totals(_apart(best)))[:, 0]
        for number in range(1, self.starts):
            tried = descent.fresh(number)
            cost = _finite(descent.totals(_apart(tried)))[:, 0]
            for victim in (cost < lowest).nonzero().flatten().tolist():
                for name, tensor in tried.items():
                    best[name][victim] = tensor[victim]
            lowest = torch.minimum(cost, lowest)
        return best

    def scheduled(self, optimizer: torch.optim.Adam, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        """The rate falls in even steps."""
        return torch.optim.lr_scheduler.StepLR(optimizer, self.falls_every, self.falls)

    def between(self, step: int, optimizer: torch.optim.Adam, variables: Variables, descent: Descent) -> None:
        """Move tokens, if it is time to. What Adam remembers of a place moves with its token."""
        if not self.moves or descent.text is None or (step + 1) % self.every or descent.streams is None:
            return
        inputs = variables[INPUTS]
        orders = self._orders(step, inputs, descent)
        tried = {
            name: tensor[:, None].expand(-1, orders.shape[1], *tensor.shape[1:]) for name, tensor in variables.items()
        }
        tried[INPUTS] = _in_order(inputs, orders)
        costs = _finite(descent.totals(tried))
        best = self._chosen(costs, orders, descent.text.read(inputs), descent.text)
        picked = orders[torch.arange(len(best)), best][:, None]
        remembered = optimizer.state[inputs]
        for tensor in (inputs, remembered["exp_avg"], remembered["exp_avg_sq"]):
            tensor.copy_(_in_order(tensor, picked)[:, 0])

    def _orders(self, step: int, inputs: Tensor, descent: Descent) -> Tensor:
        """The rearrangements (V, K, B·places) that are looked at, the first of which is none."""
        assert descent.text is not None
        assert descent.streams is not None
        draws = descent.streams.fold("moves", step).uniform(self.moves + 1, DRAWS)
        rows = zip(descent.text.stretches(), draws, strict=True)
        return torch.stack([rearrangements(own, inputs.shape[2], drawn) for own, drawn in rows])

    def _chosen(self, costs: Tensor, orders: Tensor, tokens: Tensor, text: EmbeddingSpace) -> Tensor:
        """The best of each victim's rearrangements (V,), by what they cost (V, K) and what language they make."""
        language = text.language
        if language is None or not self.fluency:
            return costs.argmin(1)
        places, found = text.tokens.shape[2], []
        for own, order, whole in zip(costs, orders, tokens[..., :places], strict=True):
            made = whole.flatten()[order].reshape(-1, *whole.shape)
            least = own[0] + self.fluency * language.nats(made[:1])[0]
            # Language costs nothing at least: what matches worse than the best so far with language need not be read.
            worth = [0, *(1 + (own[1:] < least).nonzero().flatten()).tolist()]
            total = own[worth] + self.fluency * language.nats(made[worth]).to(own)
            found.append(worth[int(total.argmin())])
        return torch.tensor(found)


def _apart(variables: Variables) -> Variables:
    """Each victim's variables as those of a single try."""
    return {name: tensor[:, None] for name, tensor in variables.items()}


def _in_order(tensor: Tensor, orders: Tensor) -> Tensor:
    """Embeddings (V, B, places, width) in K orders (V, K, B·places): (V, K, B, places, width)."""
    flat = tensor.flatten(1, 2)
    victims = torch.arange(len(flat))[:, None, None]
    return flat[victims, orders].reshape(*orders.shape[:2], *tensor.shape[1:])


def _finite(costs: Tensor) -> Tensor:
    return torch.nan_to_num(costs, nan=torch.inf)
