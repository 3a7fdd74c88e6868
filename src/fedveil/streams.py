"""Per-client random streams: every client draws from a stream of its own.

A draw depends on the client's key and on what that client drew before, and on nothing else. It is therefore
bit-equal, no matter how clients are chunked or ordered and in which process they run.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random import SFC64, Generator
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import FedveilError

_BLOCK = 2**14  # words at a time, few enough for the processor's cache


class Streams:
    """One random stream per client. Make them with `Streams.seeded` or `Streams.secure`.

    Every draw has the client as its first axis: row k comes from client k's own stream.

    >>> streams = Streams.seeded(7, range(4), "round", 0)
    >>> streams.normal(2, 3).shape
    torch.Size([4, 2, 3])
    >>> again = Streams.seeded(7, [2], "round", 0)
    >>> torch.equal(again.normal(5), Streams.seeded(7, range(4), "round", 0).normal(5)[2:3])
    True

    *Positions.* Drawing advances a stream. `rows` returns some of the clients with their own streams, not copies:
    chunks that draw one after another get the same numbers as one draw for all. `fold` returns fresh child streams,
    which depend on the key and the path only: the same path gives the same numbers again.

    *Pickling.* Seeded streams are sent to other processes as keys, and start from their beginning there. Streams that
    have been drawn from refuse, because a restart would repeat their noise: send a `fold` of them.

    *Formal privacy.* Seeded streams are for simulation: whoever knows the seed can remove the noise. Deployments draw
    from `secure`. Even then the low bits of a floating-point sample depend on what it is added to: a float32
    Gaussian output with a bit finer than 2^-26 occurs in 6.7 % of draws around 0 and never around 1. A proof of
    differential privacy over the real numbers does not cover that leak. Float64 makes it smaller, not zero.

    Draws are stable for one build; NumPy may change how it samples in a new release.
    """

    __slots__ = ("_clients", "_lineage", "_sources")

    def __init__(self, lineage: _Lineage | None, clients: tuple[int, ...], sources: list[_Source]) -> None:
        self._lineage = lineage  # None: secure
        self._clients = clients
        self._sources = sources

    @classmethod
    def seeded(cls, seed: int, clients: Sequence[int] | Tensor, *path: int | str) -> Streams:
        """Streams that anyone with the seed can repeat.

        The seed, the client numbers and the parts of the path may be integers of any size; all their bits count.
        The path says what the draws are for, such as `"round", 3, "step", 0`.
        """
        lineage = _Lineage(_encode(seed), b"".join(map(_encode, path)))
        return cls._keyed(lineage, _integers(clients))

    @classmethod
    def secure(cls, clients: int | Sequence[int]) -> Streams:
        """Streams from the operating system's entropy, for a number of clients or for those of a list.

        They never repeat: two draws differ even for the same client and path.
        """
        ids = tuple(range(clients)) if isinstance(clients, int) else _integers(clients)
        return cls(None, ids, [_SYSTEM] * len(ids))

    @classmethod
    def _keyed(cls, lineage: _Lineage, clients: tuple[int, ...]) -> Streams:
        return cls(lineage, clients, [_KeyedSource(lineage, client) for client in clients])

    @property
    def count(self) -> int:
        """The number of clients K."""
        return len(self._clients)

    def fold(self, *path: int | str) -> Streams:
        """A fresh child stream per client. `fold(a).fold(b)` is `fold(a, b)`; what was drawn before has no effect."""
        if not path:
            raise ValueError("fold needs at least one number or word: an empty path would repeat the parent's draws")
        step = b"".join(map(_encode, path))
        if self._lineage is None:
            return Streams(None, self._clients, self._sources)  # the system's generator has no state to share
        return Streams._keyed(_Lineage(self._lineage.seed, self._lineage.path + step), self._clients)

    def rows(self, index: slice | Sequence[int] | Tensor) -> Streams:
        """Some clients' streams: they draw what the full stack would draw for those clients, and advance with it.

        A client that is named twice has the same draws in both rows, as if a tensor were indexed.
        """
        if isinstance(index, slice):
            picked = list(range(self.count))[index]
        elif isinstance(index, Tensor) and index.dtype == torch.bool:
            if index.shape != (self.count,):
                raise ValueError(f"a mask of clients must have shape ({self.count},), not {tuple(index.shape)}")
            picked = index.nonzero().flatten().tolist()
        else:
            picked = [
                range(self.count)[i] for i in _integers(index)
            ]  # the range checks indices and allows negative ones
        seen: set[int] = set()
        sources = []
        for i in picked:
            sources.append(self._sources[i].twin() if i in seen else self._sources[i])
            seen.add(i)
        return Streams(self._lineage, tuple(self._clients[i] for i in picked), sources)

    # ---- draws shaped like a tensor -------------------------------------------------------------------

    def normal_like(self, like: Tensor) -> Tensor:
        """Standard normal numbers of the tensor's shape, type and device."""
        return self._like(like, self.normal)

    def uniform_like(self, like: Tensor) -> Tensor:
        """Uniform numbers in [0, 1) of the tensor's shape, type and device."""
        return self._like(like, self.uniform)

    def laplace_like(self, like: Tensor) -> Tensor:
        """Laplace numbers of scale 1 (variance 2) of the tensor's shape, type and device."""
        return self._like(like, self.laplace)

    def chance_like(self, like: Tensor, probability: float) -> Tensor:
        """1 with the given probability, else 0, in the tensor's type: for arithmetic, in which a mask would be slow."""
        # Torch converts bytes five times as fast as booleans.
        return self.chance(probability, *self._shape_of(like)).view(torch.uint8).to(like)

    def _like(self, like: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        return draw(*self._shape_of(like), dtype=like.dtype).to(like.device)

    def _shape_of(self, tensor: Tensor) -> torch.Size:
        if tensor.dim() == 0 or tensor.shape[0] != self.count:
            raise ValueError(f"the first axis must be the {self.count} clients, but the shape is {tuple(tensor.shape)}")
        return tensor.shape[1:]

    # ---- draws of a given shape per client -----------------------------------------------------------

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers: shape (K, *shape)."""
        _check_floating(dtype)
        drawn = np.float64 if dtype == torch.float64 else np.float32
        return self._fill(shape, drawn, lambda source, row: source.normal(row)).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform numbers in [0, 1): shape (K, *shape). Multiples of 2^-53 in float64, of 2^-24 in float32."""
        _check_floating(dtype)
        drawn = np.float64 if dtype == torch.float64 else np.float32
        values = self._fill(shape, drawn, lambda source, row: source.uniform(row))
        if dtype in (torch.float32, torch.float64):
            return values
        # Rounding to a shorter type could give 1: round down to its grid instead.
        steps = 2 / torch.finfo(dtype).eps
        return values.mul_(steps).floor_().div_(steps).to(dtype)

    def laplace(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Laplace numbers of scale 1 (variance 2): shape (K, *shape)."""
        _check_floating(dtype)
        drawn = np.float64 if dtype == torch.float64 else np.float32
        return self._fill(shape, drawn, lambda source, row: source.laplace(row)).to(dtype)

    def chance(self, probability: float, *shape: int) -> Tensor:
        """True with the given probability, rounded up to a multiple of 2^-64: shape (K, *shape)."""
        if not 0 <= probability <= 1:
            raise ValueError(f"a probability is between 0 and 1, not {probability}")
        threshold = math.ceil(probability * 2.0**64)
        if threshold == 2**64:
            return torch.ones(self.count, *shape, dtype=torch.bool)
        return self._fill(shape, np.bool_, lambda source, row: _below(source, row, threshold))

    def integers(self, high: int, *shape: int) -> Tensor:
        """Whole numbers 0, ..., high - 1, all equally likely: int64 of shape (K, *shape)."""
        if not 1 <= high <= 2**63:
            raise ValueError(f"high must be between 1 and 2^63, not {high}")
        return self._fill(shape, np.int64, lambda source, row: source.integers(row, high))

    def key64(self) -> Tensor:
        """One full 64-bit word per client, as the key of another generator: int64 of shape (K,)."""
        return torch.from_numpy(self._words(1).view(np.int64)).flatten()

    def permutation(self, length: int) -> Tensor:
        """A random order of 0, ..., length - 1 for each client: int64 of shape (K, length)."""
        return self._fill((length,), np.int64, lambda source, row: source.permutation(row))

    def _fill(self, shape: Sequence[int], dtype: type, draw: Callable[[_Source, NDArray[Any]], None]) -> Tensor:
        # One buffer for all clients, each row written in place. The tensor uses the buffer without a copy.
        buffer: NDArray[Any] = np.empty((self.count, math.prod(shape)), dtype)
        for source, row in zip(self._sources, buffer, strict=True):
            draw(source, row)
        return torch.from_numpy(buffer).reshape(self.count, *shape)

    def _words(self, length: int) -> NDArray[np.uint64]:
        buffer = np.empty((self.count, length), np.uint64)
        for source, row in zip(self._sources, buffer, strict=True):
            row[:] = source.words(length)
        return buffer

    # ---- as an object --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        # Neither seed nor keys, because a log must not reveal the noise.
        return f"Streams({self.count} clients, {'secure' if self._lineage is None else 'seeded'})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._lineage is None:
            raise FedveilError("secure streams cannot be copied or sent: make them in the process that draws")
        if any(source.started for source in self._sources):
            raise FedveilError(
                "streams that were drawn from cannot be copied or sent, their noise would repeat: send a fold of them"
            )
        return _restore, (self._lineage.seed, self._lineage.path, self._clients)


def _restore(seed: bytes, path: bytes, clients: tuple[int, ...]) -> Streams:
    return Streams._keyed(_Lineage(seed, path), clients)


# ---- keys --------------------------------------------------------------------------------------------


class _Lineage:
    """What the streams of all clients have in common: the encoded seed and path."""

    __slots__ = ("path", "seed")

    def __init__(self, seed: bytes, path: bytes) -> None:
        self.seed = seed
        self.path = path

    def key(self, client: int) -> bytes:
        """The client's 192-bit key."""
        whole = self.seed + _encode(client) + self.path
        return hashlib.blake2b(whole, digest_size=24, person=b"fedveil.streams").digest()


def _encode(part: int | str) -> bytes:
    """A number or word as type, length and content, so that a sequence of them can be read in one way only."""
    if isinstance(part, str):
        content = part.encode("utf-8", "surrogatepass")
        return b"s" + len(content).to_bytes(8, "little") + content
    number = operator.index(part)
    content = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"i" + len(content).to_bytes(8, "little") + content


def _integers(values: Sequence[int] | Tensor) -> tuple[int, ...]:
    if isinstance(values, int):
        raise TypeError(f"a list of clients is needed, not the number {values}: write range({values}) or [{values}]")
    listed = values.tolist() if isinstance(values, Tensor) else values
    return tuple(operator.index(value) for value in listed)


def _check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"real numbers are drawn in a floating type, not in {dtype}")


# ---- sources of the numbers ---------------------------------------------------------------------


class _Source(Protocol):
    """One client's stream. Each method but `twin` and `words` writes a whole row in place."""

    @property
    def started(self) -> bool: ...

    def twin(self) -> _Source: ...
    def words(self, count: int) -> NDArray[np.uint64]: ...
    def normal(self, row: NDArray[Any]) -> None: ...
    def laplace(self, row: NDArray[Any]) -> None: ...
    def uniform(self, row: NDArray[Any]) -> None: ...
    def integers(self, row: NDArray[Any], high: int) -> None: ...
    def permutation(self, row: NDArray[Any]) -> None: ...


class _KeyedSource:
    """NumPy's SFC64 with a 192-bit key, made at the first draw."""

    def __init__(self, lineage: _Lineage, client: int) -> None:
        self.lineage = lineage
        self.client = client

    @cached_property
    def generator(self) -> Generator:
        key = _GivenKey(self.lineage.key(self.client))
        return Generator(SFC64(key))  # type: ignore[arg-type]  # the type stubs allow only SeedSequence

    @cached_property
    def single_normals(self) -> torch.Generator:
        """For normal numbers in single precision, which torch draws more than twice as fast as NumPy.

        Torch keeps 32 bits of a seed, so the whole state of its generator is drawn from ours.
        """
        generator = torch.Generator()
        generator.set_state(twister_state(self.words(TWISTER_WORDS // 2).view(np.uint32)))
        return generator

    @property
    def started(self) -> bool:
        return "generator" in self.__dict__

    def twin(self) -> _KeyedSource:
        """The same stream at the same position, advancing independently from here."""
        twin = _KeyedSource(self.lineage, self.client)
        if self.started:
            twin.generator = deepcopy(self.generator)
        if "single_normals" in self.__dict__:
            twin.single_normals = self.single_normals.clone_state()
        return twin

    def words(self, count: int) -> NDArray[np.uint64]:
        return self.generator.bit_generator.random_raw(count)

    def normal(self, row: NDArray[Any]) -> None:
        if row.dtype == np.float32:
            torch.from_numpy(row).normal_(generator=self.single_normals)
        else:
            self.generator.standard_normal(out=row)

    def laplace(self, row: NDArray[Any]) -> None:
        self.generator.standard_exponential(dtype=row.dtype.type, out=row)
        bits = self.words(-(-row.size // 64)).view(np.uint8)
        row *= 1 - 2 * np.unpackbits(bits, count=row.size).view(np.int8)

    def uniform(self, row: NDArray[Any]) -> None:
        self.generator.random(dtype=row.dtype.type, out=row)

    def integers(self, row: NDArray[Any], high: int) -> None:
        row[:] = self.generator.integers(high - 1, size=row.size, endpoint=True)

    def permutation(self, row: NDArray[Any]) -> None:
        row[:] = np.arange(row.size)
        self.generator.shuffle(row)


class _GivenKey(ISeedSequence):
    """Passes a generator its whole key unchanged: `SeedSequence` would keep only 128 bits of it."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.frombuffer(self.key, "<u8").astype(np.uint64)


TWISTER_WORDS = 624


def twister_state(words: NDArray[np.integer[Any]]) -> Tensor:
    """A state of torch's generator, the Mersenne twister, from its 624 words of 32 bits."""
    state = _fresh_state().copy()
    state[_TWISTER_PLACE] = words
    return torch.from_numpy(state.view(np.uint8))


# The layout that torch keeps for old checkpoints: seed, position and offset, then the words with 8 bytes each.
_TWISTER_PLACE = slice(3, 3 + TWISTER_WORDS)


@cache
def _fresh_state() -> NDArray[np.uint64]:
    """The state of a generator that was never drawn from."""
    return torch.Generator().manual_seed(0).get_state().numpy().view(np.uint64)


class _SystemSource:
    """The operating system's generator, which has no state in this process that could be copied or leak."""

    started = True

    def twin(self) -> _SystemSource:
        return self

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(os.urandom(8 * count), np.uint64)

    def normal(self, row: NDArray[Any]) -> None:
        words = self.words(row.size)
        # Half a normal by its inverse CDF, on 52-bit midpoints in (0, 1/2): never 0 or 1, and both tails are alike.
        half = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-53
        row[:] = torch.special.ndtri(torch.from_numpy(half)).numpy()
        _sign(row, words)

    def laplace(self, row: NDArray[Any]) -> None:
        words = self.words(row.size)
        # The magnitude is exponential, by its inverse CDF. 1 - u is at least 2^-53, so there is no log of 0.
        row[:] = -np.log1p(-_unit(words))
        _sign(row, words)

    def uniform(self, row: NDArray[Any]) -> None:
        words = self.words(row.size)
        if row.dtype == np.float32:
            row[:] = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        else:
            row[:] = _unit(words)

    def integers(self, row: NDArray[Any], high: int) -> None:
        # Words beyond the last whole multiple of `high` would favor the small numbers: draw those again.
        last = np.uint64(2**64 - 2**64 % high - 1)
        words = self.words(row.size).copy()
        while (bad := words > last).any():
            words[bad] = self.words(int(bad.sum()))
        row[:] = (words % np.uint64(high)).astype(np.int64)

    def permutation(self, row: NDArray[Any]) -> None:
        # The order of distinct random words is uniform; with a tie it would not be.
        words = self.words(row.size)
        while len(np.unique(words)) < row.size:
            words = self.words(row.size)
        row[:] = np.argsort(words)


_SYSTEM = _SystemSource()


def _below(source: _Source, row: NDArray[np.bool_], threshold: int) -> None:
    """Whether a word is below the threshold, for every entry of the row."""
    for start in range(0, len(row), _BLOCK):
        part = row[start : start + _BLOCK]
        np.less(source.words(len(part)), np.uint64(threshold), out=part)


def _unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The upper 53 bits as numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _sign(row: NDArray[Any], words: NDArray[np.uint64]) -> None:
    """Flip the sign where the lowest bit is set. The callers use the upper bits only."""
    row *= 1 - 2 * (words & np.uint64(1)).astype(np.int8)
