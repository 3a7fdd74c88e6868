"""The attacker's model has no dropout: the victim's masks are not known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedveil.attacks.problem import Problem
from fedveil.clients.dropout import KeyedDropout


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy of the model whose dropout layers do nothing."""
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd | KeyedDropout):
            module.eval()
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0  # theirs is a number, not a layer
    return made


def dropout_off(problem: Problem) -> AbstractContextManager[object]:
    """In here, dropout that the model calls as a function does nothing either.

    Only a model that draws numbers in a forward pass is watched: watching costs a little at every call of torch.
    """
    # The model is not put into eval mode instead: batch norm, or code of its own, may then compute something else.
    before = torch.get_rng_state()
    problem.output(0, problem.like.new_zeros(problem.batch_size, *problem.shape))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    return nullcontext() if torch.equal(before, after) else DropoutOff()


_DROPOUT = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
_CHANCE = 4  # the place of `dropout_p` among the arguments of scaled_dot_product_attention


class DropoutOff(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if function in _DROPOUT:
            return args[0] if args else keywords["input"]
        if function is functional.scaled_dot_product_attention:
            if len(args) > _CHANCE:
                args = (*args[:_CHANCE], 0.0, *args[_CHANCE + 1 :])
            else:
                keywords = {**keywords, "dropout_p": 0.0}
        return function(*args, **keywords)
