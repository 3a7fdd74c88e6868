"""`inspect_model`: signs of a malicious server in a model that a client received, before it trains on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fedveil.errors import FedveilError
from fedveil.vetting.rows import row_signs

BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
FAR = 6.0  # robust z-score of a tensor's change among the changes of all tensors
LEAST_SPREAD = 0.5  # of the logarithms of these changes: tensors may well differ by a factor
REPLACED = 1.2  # length of the change of all weights, over their own; weights drawn anew come to 1.4
FEWEST_TENSORS = 4  # to tell one of them from the others
SHOWN = 3  # names in a line


@dataclass(frozen=True)
class Sign:
    """One thing that an honest server's model does not have."""

    kind: str
    where: str  # the tensor; empty where it is the model
    text: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.where}: {self.text}" if self.where else f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Inspection:
    """What was found in a received model."""

    signs: tuple[Sign, ...]

    @property
    def suspicious(self) -> bool:
        """Whether there is any sign."""
        return bool(self.signs)

    def require(self) -> None:
        """Refuse a model with signs, naming the first."""
        if self.signs:
            more = f" (and {len(self.signs) - 1} more)" if len(self.signs) > 1 else ""
            raise FedveilError(f"the model that the server sent looks malicious: {self.signs[0]}{more}")

    def __str__(self) -> str:
        return "\n".join(map(str, self.signs)) or "no sign of a malicious server was found"


def inspect_model(
    received: nn.Module | Mapping[str, Tensor],
    last: nn.Module | Mapping[str, Tensor] | None = None,
    expected: nn.Module | Mapping[str, Tensor] | None = None,
) -> Inspection:
    """Signs of a malicious server in a received model, each in a line.

    last: the model that was received in the round before; a tensor that moved far more than the others is named.
    expected: a model of the agreed architecture (or its weights by name); without it, `last` stands for it.

    It looks for an imprint block, near-duplicate or dead rows, trap weights, weights far from the last round's, and a
    changed architecture. A server that knows these checks may avoid them: nothing found does not mean honest.

    >>> layer = nn.Linear(16, 8)
    >>> print(inspect_model(layer))
    no sign of a malicious server was found
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(layer.weight[0].clone().expand(8, 16))
    ...     _ = layer.bias.copy_(torch.linspace(0, 1, 8))
    >>> inspect_model(layer).signs[0].kind
    'imprint block'
    """
    weights = _weights(received)
    before = None if last is None else _weights(last)
    like = before if expected is None else _weights(expected)
    signs = list(_changed_form(weights, like)) if like is not None else []
    broken = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        signs.append(Sign("not finite", broken[0], "it holds NaN or infinity"))
    sound = {name: tensor for name, tensor in weights.items() if name not in broken and tensor.is_floating_point()}
    for name, tensor in sound.items():
        if tensor.dim() >= 2:
            bias = sound.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
            signs += [Sign(found.kind, name, found.text) for found in row_signs(tensor, bias)]
        if fnmatchcase(name, "*running_var") and bool((tensor < 0).any()):
            signs.append(Sign("impossible buffer", name, "a variance is negative"))
    if before is not None:
        signs += _far(sound, before)
    return Inspection(tuple(signs))


def _weights(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(model.state_dict() if isinstance(model, nn.Module) else model)


def _changed_form(weights: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Iterator[Sign]:
    """Names, shapes and types that are not those of the agreed model."""
    kind = "changed architecture"
    for what, names in (("new", weights.keys() - like.keys()), ("missing", like.keys() - weights.keys())):
        if names:
            shown = ", ".join(sorted(names)[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            yield Sign(kind, "", f"{what}: {shown}")
    for name in weights.keys() & like.keys():
        one, other = weights[name], like[name]
        if one.shape != other.shape:
            yield Sign(kind, name, f"its shape is {tuple(one.shape)}, not {tuple(other.shape)}")
        elif one.dtype != other.dtype:
            yield Sign(kind, name, f"its type is {one.dtype}, not {other.dtype}")


def _far(weights: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Iterator[Sign]:
    """Tensors that moved far more than the others since the last round, or all of them replaced."""
    moved: dict[str, float] = {}
    squares = [0.0, 0.0]
    for name, tensor in weights.items():
        old = before.get(name)
        if old is None or old.shape != tensor.shape or any(fnmatchcase(name, pattern) for pattern in BUFFERS):
            continue
        change = tensor.double() - old.double()
        if tensor.numel() and bool(change.isfinite().all()):
            moved[name] = change.square().mean().sqrt().item()
            squares[0] += change.square().sum().item()
            squares[1] += old.double().square().sum().item()
    if squares[0] > REPLACED**2 * squares[1] > 0:
        ratio = math.sqrt(squares[0] / squares[1])
        yield Sign("weights far from the last round's", "", f"they changed by {ratio:.1f} times their own length")
    logs = {name: math.log(size) for name, size in moved.items() if size > 0}
    if len(logs) < FEWEST_TENSORS:
        return
    values = torch.tensor(list(logs.values()), dtype=torch.float64)
    middle = values.quantile(0.5)
    spread = max(1.4826 * (values - middle).abs().quantile(0.5).item(), LEAST_SPREAD)
    for name, value in logs.items():
        score = (value - middle.item()) / spread
        if score > FAR:
            factor = math.exp(value - middle.item())
            yield Sign(
                "weights far from the last round's", name, f"it moved {factor:,.0f} times as far as the median tensor"
            )
