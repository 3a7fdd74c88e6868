"""Stacked parameter dicts: one tensor per name, whose first axis is the client (or the victim)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from fedveil.errors import FedveilError

# So many entries of a client are treated at a time: what passes over them produce stays in the processor's cache.
# Fixed, since the numbers that are drawn for an entry must not depend on how clients are chunked.
BLOCK = 2**15
FEW = 32  # entries whose sum in single precision is exact enough for a bound
HALF = (torch.float16, torch.bfloat16)
REAL = (*HALF, torch.float32, torch.float64)  # what an update may consist of


class Tree(Mapping[str, Tensor]):
    """An immutable dict of tensors that share their first axis: K clients, each with a tensor of every name.

    >>> tree = Tree({"w": torch.ones(3, 2, 2), "b": torch.zeros(3, 2)})
    >>> tree.count, tree.size
    (3, 6)
    >>> (2 * tree + tree)["w"][0, 0, 0].item()
    3.0
    >>> tree.norm()
    tensor([2., 2., 2.])
    """

    __slots__ = ("_count", "_one", "_stacked")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._stacked: dict[str, Tensor] | None = dict(tensors)
        self._one: dict[str, Tensor] | None = None  # the row that all clients share, where it is known
        self._count = 0  # of the clients that share it
        lengths = {tensor.shape[0] if tensor.dim() else None for tensor in self._tensors.values()}
        if len(lengths) > 1 or None in lengths:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in self._tensors.items())
            raise ValueError(f"the tensors of a tree must share their first axis: {shapes}")

    # ---- building and taking apart -------------------------------------------------------------------

    @classmethod
    def stack(cls, rows: Iterable[Mapping[str, Tensor]]) -> Self:
        """K plain dicts, one per client, as one tree."""
        listed = list(rows)
        return cls({name: torch.stack([row[name] for row in listed]) for name in listed[0]})

    @classmethod
    def expand(cls, row: Mapping[str, Tensor], count: int) -> Self:
        """The same plain dict for every one of `count` clients, without copying it."""
        tree = cls.__new__(cls)  # past the checks of stacked tensors, of which it has none yet
        tree._stacked, tree._one, tree._count = None, dict(row), count
        return tree

    @property
    def _tensors(self) -> dict[str, Tensor]:
        # One row that is repeated is stacked where that is asked for: it takes as long as a small layer's gradient.
        if self._stacked is None:
            assert self._one is not None
            self._stacked = {n: t.unsqueeze(0).expand(self._count, *t.shape) for n, t in self._one.items()}
        return self._stacked

    @classmethod
    def concat(cls, trees: Sequence[Tree]) -> Self:
        """The clients of several trees one after another."""
        if len(trees) == 1:
            return cls(trees[0])
        return cls({name: torch.cat([tree[name] for tree in trees]) for name in trees[0]})

    def row(self, client: int) -> dict[str, Tensor]:
        """One client's tensors, without the leading axis."""
        if self._one is not None and -self.count <= client < self.count:
            return dict(self._one)  # indexing every tensor would take as long as a small model's gradient
        return {name: tensor[client] for name, tensor in self._tensors.items()}

    def rows(self, index: slice | Tensor | Sequence[int]) -> Tree:
        """Some clients' rows, still stacked; one copy that is repeated stays one."""
        if not isinstance(index, slice | Tensor):
            index = list(index)  # a tuple would index the tensors' further axes
        if self._tensors and self.repeated:
            count = len(torch.empty(self.count, 0)[index])
            return Tree.expand(self.row(0), count)
        return Tree({name: tensor[index] for name, tensor in self._tensors.items()})

    # ---- mapping -------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors if self._one is None else self._one)

    def __len__(self) -> int:
        return len(self._tensors if self._one is None else self._one)

    def __reduce__(self) -> tuple[type[Tree], tuple[dict[str, Tensor]]]:
        return Tree, (self._tensors,)  # the row would travel a second time

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}: {tuple(tensor.shape)}" for name, tensor in self._tensors.items())
        return f"Tree({inside})"

    @property
    def count(self) -> int:
        """The number of clients K (0 for a tree without tensors)."""
        if self._one is not None:
            return self._count if self._one else 0
        return next(iter(self._tensors.values())).shape[0] if self._tensors else 0

    @property
    def size(self) -> int:
        """The number of entries of one client."""
        return sum(tensor[0].numel() for tensor in self._tensors.values()) if self.count else 0

    @property
    def repeated(self) -> bool:
        """Whether every client has one and the same copy (as `expand` makes it)."""
        if self._one:
            return self.count > 1
        return all(tensor.shape[0] > 1 and tensor.stride(0) == 0 for tensor in self._tensors.values())

    # ---- arithmetic ----------------------------------------------------------------------------------

    def map(self, function: Callable[[Tensor], Tensor]) -> Tree:
        """The function applied to every tensor, leading axis included."""
        return Tree({name: function(tensor) for name, tensor in self._tensors.items()})

    def entrywise(self, function: Callable[[Tensor], Tensor]) -> Tree:
        """The function applied to every entry, for functions that treat all entries alike.

        It gets matrices (K, n) of some entries of each client, fewer than there are tensors, and may work in place:
        they are copies. Entries of half precision come as float32, and what becomes of them is rounded once. An entry
        that is no real number is refused: to leave it as it is would send it out unprotected.
        """
        require_real(self._tensors)
        if len({(tensor.dtype, tensor.device) for tensor in self._tensors.values()}) > 1:
            parts = {name: Tree({name: tensor}) for name, tensor in self._tensors.items()}
            return Tree({name: part.entrywise(function)[name] for name, part in parts.items()})
        if not self._tensors:
            return self
        entries = self.flat()
        for part in torch.split(entries, BLOCK, dim=1):
            if (changed := function(at_least_single(part))) is not part:
                part.copy_(changed)
        return self.unflat(entries)

    def combine(self, other: Mapping[str, Tensor], function: Callable[[Tensor, Tensor], Tensor]) -> Tree:
        """The function applied to the pairs of equal name."""
        if self._tensors.keys() != other.keys():
            odd = sorted(self._tensors.keys() ^ other.keys())
            raise ValueError(f"the trees do not have the same names: {', '.join(odd)}")
        return Tree({name: function(tensor, other[name]) for name, tensor in self._tensors.items()})

    def __add__(self, other: Tree) -> Tree:
        return self._paired(other, torch._foreach_add) or self.combine(other, torch.add)

    def __sub__(self, other: Tree) -> Tree:
        return self._paired(other, torch._foreach_sub) or self.combine(other, torch.sub)

    def __neg__(self) -> Tree:
        return self.map(torch.neg)

    def __mul__(self, factor: float | Tensor) -> Tree:
        """Times a number, or times one number per client (a tensor of shape (K,))."""
        if isinstance(factor, Tensor) and factor.dim() == 1:
            return self.map(lambda tensor: tensor * per_client(factor, tensor))
        if self._one and self._count == 1 and not isinstance(factor, Tensor):
            return Tree.expand(dict(zip(self._one, torch._foreach_mul([*self._one.values()], factor), strict=True)), 1)
        return self.map(lambda tensor: tensor * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> Tree:
        if isinstance(divisor, Tensor) and divisor.dim() == 1:
            return self.map(lambda tensor: tensor / per_client(divisor, tensor))
        return self.map(lambda tensor: tensor / divisor)

    def _paired(self, other: Tree, function: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]) -> Tree | None:
        """The function of all pairs at once, where this is one client's row: a fifth of the time on a small model."""
        if self.count != 1 or other.count != 1 or not (self._one or other._one) or self.keys() != other.keys():
            return None
        own, theirs = self.row(0), other.row(0)
        found = function([*own.values()], [theirs[name] for name in own])
        return Tree.expand(dict(zip(own, found, strict=True)), 1)

    def dot(self, other: Mapping[str, Tensor]) -> Tensor:
        """The inner product of each client's tensors with the other's: shape (K,)."""
        products = self.combine(other, lambda a, b: matrix(a * b).sum(1))
        return torch.stack(list(products.values())).sum(0)

    def norm(self, order: float = 2.0) -> Tensor:
        """The norm of each client's entries taken together: shape (K,)."""
        norms = [torch.linalg.vector_norm(matrix(t), order, dim=1) for t in self._tensors.values()]
        return torch.linalg.vector_norm(torch.stack(norms), order, dim=0)  # type: ignore[no-any-return]

    def length(self, order: float = 2.0) -> Tensor:
        """The norm in double precision, for bounds: never below the true one, at most 4e-6 above (1e-12 for float64).

        In float32, sums over 20 million entries are off by percents. So only a few entries at a time are summed there,
        which is many times as fast as summing all in double precision.
        """
        if all(tensor.dtype == torch.float64 for tensor in self._tensors.values()):
            return self.norm(order) * (1 + 1e-12)
        parts = [part for tensor in self._tensors.values() for part in _partial_norms(matrix(tensor), order)]
        rough: Tensor = torch.linalg.vector_norm(torch.cat(parts, dim=1), order, dim=1) * (1 + 2 * FEW * 2.0**-24)
        fine = (rough > 1e-12) & (rough < 1e18)
        if bool(fine.all()):
            return rough
        # Squares may have left the range of float32. One client's length must not depend on whether another's did.
        each = [torch.linalg.vector_norm(matrix(t).double(), order, dim=1) for t in self._tensors.values()]
        exact = torch.linalg.vector_norm(torch.stack(each), order, dim=0) * (1 + 1e-12)
        return torch.where(fine, rough, exact)

    def flat(self) -> Tensor:
        """Every client's entries in one row: shape (K, size)."""
        return torch.cat([matrix(tensor) for tensor in self._tensors.values()], dim=1)

    def unflat(self, matrix: Tensor) -> Tree:
        """The inverse of `flat`: rows of the matrix in the shapes and names of this tree."""
        parts = torch.split(matrix, [tensor[0].numel() for tensor in self._tensors.values()], dim=1)
        shapes = [tensor.shape[1:] for tensor in self._tensors.values()]
        return Tree({n: p.reshape(-1, *s) for n, p, s in zip(self._tensors, parts, shapes, strict=True)})

    def mean(self, weights: Tensor | None = None) -> dict[str, Tensor]:
        """The (weighted) mean over clients, summed in client order so that chunking cannot change it."""
        total = RunningMean()
        total.add(self, weights)
        return total.result()

    def isfinite(self) -> Tensor:
        """Whether all of a client's entries are finite: shape (K,)."""
        real = [torch.view_as_real(t) if t.is_complex() else t for t in self._tensors.values()]
        floating = [matrix(tensor) for tensor in real if tensor.is_floating_point()]
        # A finite sum has finite terms: one pass, where looking at every entry takes three.
        if floating and not torch.isfinite(torch.stack([tensor.sum(1).double() for tensor in floating])).all():
            return torch.stack([torch.isfinite(tensor).all(1) for tensor in floating]).all(0)
        return torch.ones(self.count, dtype=torch.bool)

    def to(self, *arguments: torch.device | torch.dtype | str) -> Tree:
        """Every floating tensor moved or cast; integers are only moved."""

        def move(tensor: Tensor) -> Tensor:
            for argument in arguments:
                if isinstance(argument, torch.dtype) and not tensor.is_floating_point():
                    continue
                tensor = tensor.to(argument)
            return tensor

        return self.map(move)

    def like(self, other: Mapping[str, Tensor]) -> Tree:
        """Every tensor in the type of the other's tensor of that name."""
        return self.combine(other, lambda tensor, model: tensor.to(model.dtype))


class RunningMean:
    """A weighted mean over clients that arrive in chunks, in client order.

    Rows are added one by one in double precision: the result does not depend on how the clients were chunked.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}
        self._weight = 0.0
        self._bare = False
        self.count = 0

    def add(self, tree: Tree, weights: Tensor | None = None) -> None:
        """Add the clients of a tree, with a weight each (1 if none are given)."""
        self._bare = self._bare or not len(tree)
        factors = [1.0] * tree.count if weights is None else weights.tolist()
        for name, tensor in tree.items():
            self._types[name] = tensor.dtype
            if name not in self._sums:
                self._sums[name] = torch.zeros(tensor.shape[1:], dtype=torch.float64, device=tensor.device)
            for factor, row in zip(factors, tensor, strict=True):
                self._sums[name].add_(row, alpha=factor)
        for factor in factors:
            self._weight += factor
        self.count += tree.count

    def result(self) -> dict[str, Tensor]:
        """The mean so far; integer tensors are rounded back to their own type."""
        if self._bare and not self._sums:
            return {}  # a model without such tensors, say without buffers: nothing to take the mean of
        if self._weight <= 0:
            raise FedveilError("no client reported an update: there is no mean to take")
        means = {name: total / self._weight for name, total in self._sums.items()}
        return {
            name: (mean if self._types[name].is_floating_point else mean.round()).to(self._types[name])
            for name, mean in means.items()
        }


def clipped(update: Tree, norm: float, order: Literal["l1", "l2"] = "l2") -> Tree:
    """Every row scaled down to a norm of at most `norm`, also after rounding: noise is measured by that bound.

    So a row that is scaled ends a hair below it, by less than 1e-5 of it in float32; half precision is rounded towards
    zero.
    """
    double = all(tensor.dtype == torch.float64 for tensor in update.values())
    factor = clip_factors(update.length(1.0 if order == "l1" else 2.0), norm, update.size, order, double=double)
    if bool((factor == 1).all()):
        return update
    return update.map(lambda tensor: _scaled(tensor, per_client(factor, tensor)))


def clip_factors(
    length: Tensor, norm: float, size: int, order: Literal["l1", "l2"] = "l2", *, double: bool = False
) -> Tensor:
    """What rows of so many entries are multiplied with for that, given their lengths; `double`: rows of float64."""
    digits = torch.finfo(torch.float64 if double else torch.float32)
    slack = 4 * digits.eps
    # Subnormal entries lose digits: rounding may make one larger by half of the smallest number there is.
    lost = digits.smallest_normal * slack * size ** (1.0 if order == "l1" else 0.5)
    factor = torch.where(length <= norm, 1.0, max(norm * (1 - slack) - lost, 0.0) / length)
    return torch.where(factor < digits.smallest_normal, 0.0, factor)


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """The tensor times the factor; in half precision no entry gets larger by rounding."""
    if tensor.dtype not in HALF:
        return tensor * factor.to(tensor.dtype)
    exact = tensor.float() * factor.float()
    rounded = exact.to(tensor.dtype)
    # Read as an integer, the bits of the next float towards zero are one less.
    lower = (rounded.view(torch.int16) - 1).view(tensor.dtype)
    return torch.where(rounded.float().abs() > exact.abs(), lower, rounded)


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    """What these tensors weigh, in memory or as an uncompressed message."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def require_real(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what no defense protects and no mean is taken of: entries that are not real numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in REAL:
            kind = str(tensor.dtype).removeprefix("torch.")
            remedy = "keep its real and imaginary part in a parameter each" if tensor.is_complex() else "use float32"
            raise FedveilError(
                f"the parameter '{name}' is of type {kind}, which no defense can protect and no server average: "
                f"{remedy}"
            )


def _partial_norms(entries: Tensor, order: float) -> tuple[Tensor, Tensor]:
    """Norms of a few entries at a time of each row, which together have the norm of the row: (K, m) each, in double."""
    if entries.dtype == torch.float64:
        return entries, entries[:, :0]
    whole = entries.shape[1] // FEW * FEW
    groups = at_least_single(entries[:, :whole]).reshape(len(entries), whole // FEW, FEW)
    return torch.linalg.vector_norm(groups, order, dim=2).double(), entries[:, whole:].double()


def at_least_single(tensor: Tensor) -> Tensor:
    """Half precision as float32: noise is drawn and added there, and rounded once at the end."""
    return tensor.float() if tensor.dtype in HALF else tensor


def per_client(values: Tensor, like: Tensor) -> Tensor:
    """One value per client, shaped to multiply a tensor whose first axis is the client."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def matrix(tensor: Tensor) -> Tensor:
    """Each client's entries as one row: shape (K, n), also where a client has a single number."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
