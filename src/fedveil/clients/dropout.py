"""Dropout layers that draw from the client's stream instead of the process's generator.

A dropout layer of `torch.nn` draws from one global generator: under `vmap` all clients would share it, and a run
would depend on how its clients were chunked. Here every dropout layer of a copy of the model is swapped for one
whose mask is a hash of a 64-bit key (a buffer, one per client and step) and the entry's position. The same tensor
code then serves a loop, `vmap` and `torch.compile`, with equal masks. Where the model itself runs, and not a copy, its
layers are keyed for the duration of a pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedveil.clients.draws import repeated_pass

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio as a signed 64-bit number, the increment of splitmix64
_MIX1 = -4658895280553007687  # the multipliers of splitmix64's finalizer
_MIX2 = -7723592293110705685


def _mix(word: Tensor) -> Tensor:
    """The finalizer of splitmix64 on signed 64-bit words, whose products wrap; shifts are made logical by a mask."""
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _MIX1
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


def keyed_uniform(key: Tensor, size: int) -> Tensor:
    """`size` numbers in [0, 1) that depend only on the 64-bit key: 24 random bits each. For several keys a row each."""
    # Exclusive or, and not splitmix64's own sum: the compiler evaluates products with a range of indices itself, and
    # refuses one that wraps.
    bits = _mix(_mix(key).unsqueeze(-1) ^ torch.arange(size, device=key.device))
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def example_key(key: Tensor, index: Tensor | int) -> Tensor:
    """The key of one example of a batch, or of several, for gradients that are taken example by example."""
    # A tensor, also of a plain number: its product wraps, where Python's would grow beyond 64 bits.
    return _mix(key ^ ((torch.as_tensor(index, device=key.device) + 1) * _GOLDEN))


class NotByExample(Exception):
    """A layer has a key for each example, and its input has another number of them in front."""


class KeyedDropout(nn.Module):
    """Stands in for `nn.Dropout` and its 1d to 3d forms, which drop whole channels.

    `key` is replaced at every call by the client's own; each forward pass moves it on, so that a layer used twice
    in one pass draws twice. With a key for each example of a batch, each gets the mask that it would get alone.
    """

    key: Tensor

    def __init__(self, p: float, spatial: int) -> None:
        super().__init__()
        self.p = p  # named as in torch: some models read it from their dropout layers
        self.spatial = spatial  # how many trailing axes are one channel; 0: every entry on its own
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return inputs
        # As in torch, where `Dropout2d` takes three axes for (example, channel, place) and not for one example.
        shape = inputs.shape[: max(inputs.dim() - self.spatial, 2 if self.spatial == 2 else 1)]
        if self.key.dim() and shape[:1] != self.key.shape:
            raise NotByExample
        uniform = keyed_uniform(self.key, shape[self.key.dim() :].numel()).reshape(shape)
        self.key.add_(1)
        keep = 1 - self.p
        kept = (uniform < keep).to(inputs.dtype).reshape(*shape, *[1] * (inputs.dim() - len(shape)))
        return inputs * kept / keep if keep > 0 else inputs * 0


# Layers that are swapped, and how many trailing axes they drop together.
DROPOUTS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def with_keyed_dropout(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A copy of the model whose dropout layers are keyed, and the names of their key buffers."""
    made = copy.deepcopy(model)
    keys = []
    swapped: dict[nn.Module, KeyedDropout] = {}  # a layer may stand under several names
    for name, module in list(made.named_modules(remove_duplicate=False)):
        if type(module) in DROPOUTS and isinstance(module, nn.modules.dropout._DropoutNd):
            if module not in swapped:
                swapped[module] = KeyedDropout(module.p, DROPOUTS[type(module)]).train(module.training)
                keys.append(f"{name}.key" if name else "key")
            if not name:
                return swapped[module], keys
            parent, _, child = name.rpartition(".")
            setattr(made.get_submodule(parent), child, swapped[module])
    return made, keys


class StandIn(KeyedDropout):
    """Does the work of a dropout layer that stays where it is."""

    def forward(self, inputs: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise repeated_pass()
        return super().forward(inputs)


@contextmanager
def keyed_for_a_while(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, KeyedDropout]]:
    """Let the dropout layers among a model's own modules drop by keys; gives their stand-ins by the names of the keys.

    The layers stay where they are, with their hooks, so that a model may reach them in any way.
    """
    found: dict[str, KeyedDropout] = {}
    layers = []
    try:
        for name, module in modules.items():
            if type(module) in DROPOUTS and module.training and isinstance(module, nn.modules.dropout._DropoutNd):
                stand_in = StandIn(module.p, DROPOUTS[type(module)])
                found[f"{name}.key" if name else "key"] = stand_in
                layers.append(module)
                module.forward = stand_in.forward
        yield found
    finally:
        for module in layers:
            del module.forward
