"""What the linear layers of a model of text are given, for any sentence: where their gradients point to.

The gradient of a linear layer is a sum of outer products with the inputs of every token, so its rows lie in the span of
these inputs. Layers that are given the same numbers (query, key and value) share one span.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.attacks.scene import Public
from fedveil.attacks.without_dropout import without_dropout
from fedveil.errors import FedveilError
from fedveil.tasks.text_form import TextForm
from fedveil.tree import Tree

LOOKED_AT = 2  # groups behind the first: what they are given depends on all tokens of a sentence
AT_ONCE = 2**23  # numbers that go through the model at a time


@dataclass(frozen=True)
class Group:
    """Linear layers that are given the same numbers."""

    modules: tuple[str, ...]
    width: int  # of what they are given
    transposed: bool = False  # weights are (inputs, outputs), as in GPT-2

    def rows(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """The gradients of all its layers, one row for each output: (outputs, width + 1), the bias last.

        Layers without a bias have a zero there. The rows of all layers lie in one span.
        """
        parts = []
        for name in self.modules:
            weight = gradient[f"{name}.weight"]
            weight = weight.T if self.transposed else weight
            bias = gradient.get(f"{name}.bias")
            parts.append(torch.cat([weight, torch.zeros_like(weight[:, :1]) if bias is None else bias[:, None]], 1))
        return torch.cat(parts)

    def biased(self, gradient: Mapping[str, Tensor]) -> bool:
        """Whether all its layers have a bias, whose gradient then is one more column."""
        return all(f"{name}.bias" in gradient for name in self.modules)


class TextLayers:
    """A model of text with the weights that a victim was sent, which tells what its linear layers are given."""

    def __init__(self, public: Public, before: Tree) -> None:
        form = public.layout.text
        if form is None:
            raise FedveilError("the layers of a model of text are looked at, and these are no sentences")
        self.form: TextForm = form
        self.model = copy.deepcopy(without_dropout(public.model)).eval()
        self.weights = {name: tensor.detach() for name, tensor in before.row(0).items()}
        self.groups = self._found()
        modules = [name for group in self.groups[: 1 + LOOKED_AT] for name in group.modules]
        self.watched = tuple(f"{name}.{part}" for name in modules for part in ("weight", "bias"))

    def _found(self) -> tuple[Group, ...]:
        """The groups in the order in which the model gets to them."""
        tokens = torch.zeros(1, 3) + torch.tensor([[1.0, 2.0, 3.0]]).clamp_max(self.form.entries - 1)
        calls: list[tuple[str, nn.Module, Tensor]] = []
        names = {module: name for name, module in self.model.named_modules() if _linear(module)}

        def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            calls.append((names[module], module, given[0]))

        handles = [module.register_forward_pre_hook(note) for module in names]
        self._forward(tokens)
        for handle in handles:
            handle.remove()
        found: list[Group] = []
        last: Tensor | None = None
        for name, module, given in calls:
            if given.dim() != 3 or given.shape[1] != tokens.shape[1] or f"{name}.weight" not in self.weights:
                continue
            transposed = not isinstance(module, nn.Linear)
            if given is last:
                found[-1] = Group((*found[-1].modules, name), found[-1].width, transposed)
            else:
                found.append(Group((name,), given.shape[2], transposed))
            last = given
        return tuple(found)

    def given(self, tokens: Tensor, groups: Sequence[int]) -> list[Tensor]:
        """What some groups are given for sentences (N, places): (N, places, width) each, in the order asked for."""
        wanted = {self.groups[number].modules[0]: number for number in groups}
        last = self.groups[max(groups)].modules[0]
        step = max(1, AT_ONCE // (tokens.shape[1] * self.form.width * (1 if max(groups) == 0 else 16)))
        parts: dict[int, list[Tensor]] = {number: [] for number in groups}
        handles = []
        for name, module in self.model.named_modules():
            if name in wanted:
                handles.append(module.register_forward_pre_hook(_keep(parts[wanted[name]], stop=name == last)))
        try:
            for start in range(0, len(tokens), step):
                try:
                    self._forward(tokens[start : start + step])
                except _Enough:
                    continue
        finally:
            for handle in handles:
                handle.remove()
        return [torch.cat(parts[number]) for number in groups]

    def first(self, token_numbers: Tensor, places: int) -> Tensor:
        """What the first group is given for every one of some tokens at every place: (tokens, places, width)."""
        return self.given(token_numbers[:, None].float().expand(-1, places), [0])[0]

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> None:
        functional_call(self.model, self.weights, (), self.form.inputs(tokens))


class _Enough(Exception):
    """Stops a forward pass."""


def _keep(into: list[Tensor], *, stop: bool) -> object:
    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        into.append(given[0].detach())
        if stop:
            raise _Enough

    return hook


def _linear(module: nn.Module) -> bool:
    """A linear layer of torch, or one of transformers whose weights are (inputs, outputs)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
