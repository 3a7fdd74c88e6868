"""Streams: each client's draws are its own, the distributions are right, and keys do not collide."""

import copy
import itertools
import math
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.errors import FedveilError
from fedveil.streams import Streams, twister_state

DRAWS = {
    "normal": lambda s: s.normal(7, 3),
    "normal64": lambda s: s.normal(5, dtype=torch.float64),
    "uniform": lambda s: s.uniform(11),
    "uniform64": lambda s: s.uniform(3, dtype=torch.float64),
    "laplace": lambda s: s.laplace(13),
    "laplace64": lambda s: s.laplace(13, dtype=torch.float64),
    "chance": lambda s: s.chance(0.5, 70),
    "integers": lambda s: s.integers(10, 9),
    "key64": lambda s: s.key64(),
    "permutation": lambda s: s.permutation(6),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
both_modes = pytest.mark.parametrize(
    "streams", [lambda: Streams.seeded(5, range(4)), lambda: Streams.secure(4)], ids=["seeded", "secure"]
)


def draw_everything(streams):
    return [draw(streams) for draw in DRAWS.values()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def key(streams):
    """The first word of each client, which stands for its key."""
    return tuple(streams.key64().tolist())


# ---- whose stream it is ------------------------------------------------------------------------------


@each_draw
def test_draws_do_not_depend_on_chunks(draw):
    whole = draw(Streams.seeded(1, range(10), "x"))
    for size in (1, 3, 4):
        parts = [draw(Streams.seeded(1, range(10)[i : i + size], "x")) for i in range(0, 10, size)]
        assert torch.equal(torch.cat(parts), whole)


@each_draw
def test_draws_do_not_depend_on_order(draw):
    order = [3, 0, 4, 1, 2]
    assert torch.equal(draw(Streams.seeded(1, order)), draw(Streams.seeded(1, range(5)))[order])
    assert torch.equal(draw(Streams.seeded(1, torch.tensor(order))), draw(Streams.seeded(1, order)))


def test_draws_do_not_depend_on_the_process():
    streams = Streams.seeded(2**200 + 1, [4, 2**70], "round", 3)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        elsewhere = pool.submit(draw_everything, streams).result()
    assert equal(elsewhere, draw_everything(streams))


@each_draw
def test_clients_differ_and_draws_go_on(draw):
    streams = Streams.seeded(1, range(3))
    first, second = draw(streams), draw(streams)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


@each_draw
def test_one_client_drawing_more_leaves_the_others_alone(draw):
    streams, plain = Streams.seeded(1, range(3)), Streams.seeded(1, range(3))
    streams.rows([1]).normal(100)
    after, untouched = draw(streams), draw(plain)
    assert torch.equal(after[[0, 2]], untouched[[0, 2]])
    assert not torch.equal(after[1], untouched[1])


@pytest.mark.parametrize(
    "index",
    [
        slice(1, 3),
        slice(None, None, 2),
        [3, 1],
        [-1, 0],
        range(2),
        torch.tensor([2, 0]),
        torch.tensor([True, False, True, False]),
        [2, 2, 0, 2],
        [],
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [0, 1], ids=["fresh", "drawn"])
def test_rows_draw_what_the_full_stack_would(index, before):
    full, part = Streams.seeded(1, range(4)), Streams.seeded(1, range(4))
    for _ in range(before):
        full.normal(3)
        part.normal(3)
    wanted, some = draw_everything(full), part.rows(index)
    tensor_index = list(index) if isinstance(index, range) else index
    if isinstance(tensor_index, list):
        tensor_index = torch.tensor(tensor_index, dtype=torch.int64)
    assert equal(draw_everything(some), [tensor[tensor_index] for tensor in wanted])


def test_rows_share_their_position_with_the_stack():
    whole, chunked = Streams.seeded(1, range(5)), Streams.seeded(1, range(5))
    first = whole.normal(4)
    assert torch.equal(torch.cat([chunked.rows(slice(0, 2)).normal(4), chunked.rows([2, 3, 4]).normal(4)]), first)
    assert torch.equal(chunked.normal(4), whole.normal(4))


def test_rows_errors():
    streams = Streams.seeded(1, range(4))
    with pytest.raises(IndexError):
        streams.rows([4])
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        streams.rows(torch.tensor([True]))


# ---- keys --------------------------------------------------------------------------------------------

parts = st.one_of(st.integers(), st.integers(-(2**300), 2**300), st.text(st.characters(), max_size=6))
paths = st.lists(parts, max_size=4).map(tuple)


@settings(deadline=None)
@given(st.integers(), st.integers(), paths, st.integers(), st.integers(), paths)
def test_different_names_have_different_keys(seed, client, path, seed2, client2, path2):
    same = (seed, client, path) == (seed2, client2, path2)
    assert (key(Streams.seeded(seed, [client], *path)) == key(Streams.seeded(seed2, [client2], *path2))) == same


@settings(deadline=None)
@given(st.integers(0, 2**200), st.integers(0, 300), st.sampled_from(["seed", "client", "path"]))
def test_every_bit_counts(number, bit, where):
    def made(value):
        triple = {"seed": 0, "client": 0, "path": 0} | {where: value}
        return key(Streams.seeded(triple["seed"], [triple["client"]], triple["path"]))

    assert made(number) != made(number ^ (1 << bit))


def test_look_alikes_have_different_keys():
    paths = [(), (1,), ("1",), (-1,), (255,), ("ab", "c"), ("a", "bc"), ("abc",), ("",), ("", ""), (0,), (0, 0), (256,)]
    made = [key(Streams.seeded(0, [0], *path)) for path in paths]
    made += [key(Streams.seeded(0, [1])), key(Streams.seeded(1, [0])), key(Streams.seeded(2**32, [0]))]
    made += [key(Streams.seeded(2**64, [0])), key(Streams.seeded(0, [2**32])), key(Streams.seeded(0, [-(2**64)]))]
    assert len(set(made)) == len(made)


@settings(deadline=None)
@given(paths.filter(bool), paths.filter(bool))
def test_fold_is_a_longer_path(first, second):
    root = Streams.seeded(3, [0, 9])
    wanted = key(Streams.seeded(3, [0, 9], *first, *second))
    assert key(root.fold(*first).fold(*second)) == wanted
    assert key(root.fold(*first, *second)) == wanted


def test_fold_ignores_what_was_drawn():
    fresh, drawn = Streams.seeded(3, range(2)), Streams.seeded(3, range(2))
    drawn.normal(10)
    assert key(drawn.fold("a")) == key(fresh.fold("a"))
    assert key(drawn.rows([1]).fold("a")) == key(fresh.fold("a"))[1:]
    with pytest.raises(ValueError, match="at least one"):
        fresh.fold()


def test_numpy_and_torch_numbers_are_numbers():
    assert key(Streams.seeded(np.int64(3), np.arange(2), np.int32(1))) == key(Streams.seeded(3, [0, 1], 1))
    for bad in (1.5, None, b"a"):
        with pytest.raises(TypeError):
            Streams.seeded(3, [0], bad)
    with pytest.raises(TypeError, match=r"range\(4\)"):
        Streams.seeded(3, 4)


def test_a_million_keys_do_not_collide():
    from fedveil.streams import _encode, _Lineage

    lineages = [_Lineage(_encode(seed), _encode(step)) for seed, step in itertools.product(range(100), range(100))]
    keys = {lineage.key(client) for lineage in lineages for client in range(100)}
    assert len(keys) == 1_000_000
    assert {len(k) for k in keys} == {24}


def test_first_draws_do_not_collide():
    words = torch.cat([Streams.seeded(seed, range(200), "a").key64() for seed in range(100)])
    assert len(words.unique()) == 20_000
    # Full words: each of the 64 bits is set about half the time.
    bits = (words.unsqueeze(1) >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(20_000)


def test_neighbors_are_not_correlated():
    draws = torch.cat([Streams.seeded(0, range(20)).normal(20_000), Streams.seeded(1, range(20)).normal(20_000)])
    correlation = torch.corrcoef(draws) - torch.eye(40)
    assert correlation.abs().max() < 5.5 / math.sqrt(20_000)


# ---- distributions -----------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["normal", "uniform", "laplace"])
def test_distribution(streams, name, dtype):
    # Secure draws differ from run to run: a fair test at this level fails once in a million runs.
    law, moment = {
        "normal": (stats.norm, lambda n: 0 if n % 2 else math.factorial(n) / 2 ** (n / 2) / math.factorial(n // 2)),
        "uniform": (stats.uniform, lambda n: 1 / (n + 1)),
        "laplace": (stats.laplace, lambda n: 0 if n % 2 else math.factorial(n)),
    }[name]
    values = getattr(streams(), name)(50_000, dtype=dtype)
    assert values.dtype == dtype
    flat = values.flatten().double().numpy()
    assert stats.kstest(flat, law.cdf).pvalue > 1e-6
    for order in (1, 2, 3, 4):
        mean, square = moment(order), moment(2 * order)
        assert abs((flat**order).mean() - mean) < 6 * math.sqrt((square - mean**2) / flat.size)
    assert np.isfinite(flat).all()


@both_modes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_support(streams, dtype):
    values = streams().uniform(100_000, dtype=dtype)
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    steps = 2 / torch.finfo(dtype).eps
    assert torch.equal(values.double() * steps, (values.double() * steps).round())  # an exact grid


@pytest.mark.parametrize("word", [0, 1, 2**64 - 1, 2**64 - 2, 2**63])
def test_extreme_words_stay_in_range(monkeypatch, word):
    monkeypatch.setattr("os.urandom", lambda size: np.full(size // 8, word, np.uint64).tobytes())
    streams = Streams.secure(2)
    for dtype in (torch.float32, torch.float64):
        assert streams.normal(9, dtype=dtype).abs().max() < 9
        assert streams.laplace(9, dtype=dtype).abs().max() < 37
        uniform = streams.uniform(9, dtype=dtype)
        assert uniform.min() >= 0
        assert uniform.max() < 1


@both_modes
def test_tails_are_symmetric_and_both_reached(streams):
    for values in (streams().normal(50_000), streams().laplace(50_000)):
        above, below = (values > 2).sum().item(), (values < -2).sum().item()
        assert abs(above - below) < 6 * math.sqrt(above + below)


@both_modes
@pytest.mark.parametrize("high", [1, 2, 3, 10, 2**40 + 1, 2**63])
def test_integers(streams, high):
    values = streams().integers(high, 5000)
    assert values.dtype == torch.int64
    assert values.shape == (4, 5000)
    assert values.min() >= 0
    assert values.max() <= high - 1
    counts = np.histogram(values.double().numpy() / high, bins=min(high, 16), range=(0, 1))[0]
    if high <= 10:
        counts = np.bincount(values.flatten(), minlength=high)
    assert high == 1 or stats.chisquare(counts).pvalue > 1e-6


def test_integers_reject_a_bad_bound():
    for high in (0, -1, 2**63 + 1):
        with pytest.raises(ValueError, match="between 1 and"):
            Streams.seeded(0, [0]).integers(high, 2)


def test_secure_integers_draw_biased_words_again(monkeypatch):
    words = iter([np.array([2**64 - 1, 7], np.uint64), np.array([5], np.uint64)])
    monkeypatch.setattr("os.urandom", lambda size: next(words).tobytes())
    assert Streams.secure(1).integers(10, 2).tolist() == [[5, 7]]


def test_secure_permutation_draws_ties_again(monkeypatch):
    words = iter([np.array([3, 3, 1], np.uint64), np.array([9, 2, 5], np.uint64)])
    monkeypatch.setattr("os.urandom", lambda size: next(words).tobytes())
    assert Streams.secure(1).permutation(3).tolist() == [[1, 2, 0]]


@both_modes
def test_permutations_are_uniform(streams):
    made = streams()
    drawn = [tuple(row) for _ in range(1500) for row in made.permutation(4).tolist()]
    orders = list(itertools.permutations(range(4)))
    assert set(drawn) == set(orders)
    assert stats.chisquare([drawn.count(order) for order in orders]).pvalue > 1e-6


@both_modes
def test_permutations_hold_every_number(streams):
    for length in (0, 1, 100):
        drawn = streams().permutation(length)
        assert torch.equal(drawn.sort(1).values, torch.arange(length).expand(4, length))


# ---- tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["normal", "uniform", "laplace"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_like(name, dtype):
    like = torch.empty(4, 2, 3, dtype=dtype)
    drawn = getattr(Streams.seeded(5, range(4)), f"{name}_like")(like)
    assert (drawn.shape, drawn.dtype, drawn.device) == (like.shape, like.dtype, like.device)
    assert drawn.is_contiguous()
    assert not drawn.requires_grad


def test_like_is_the_draw_of_the_same_shape():
    like = torch.empty(4, 3, 2).transpose(1, 2).requires_grad_()
    assert torch.equal(Streams.seeded(5, range(4)).normal_like(like), Streams.seeded(5, range(4)).normal(2, 3))
    assert Streams.seeded(5, range(4)).normal_like(torch.empty(4, 2, device="meta")).device.type == "meta"


def test_short_types_are_cast_from_float32():
    a, b = Streams.seeded(5, range(4)), Streams.seeded(5, range(4))
    assert torch.equal(a.normal(6, dtype=torch.bfloat16), b.normal(6).bfloat16())


def test_empty_shapes():
    streams = Streams.seeded(5, range(4))
    assert streams.normal().shape == (4,)
    assert streams.normal(0, 3).shape == (4, 0, 3)
    assert Streams.seeded(5, []).normal(3).shape == (0, 3)
    assert Streams.secure([]).laplace(3).shape == (0, 3)


def test_results_share_no_memory():
    streams = Streams.seeded(5, range(4))
    first = streams.normal(3)
    kept = first.clone()
    streams.normal(3).zero_()
    assert torch.equal(first, kept)


def test_like_errors():
    streams = Streams.seeded(5, range(4))
    for wrong in (torch.empty(3, 2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="4 clients"):
            streams.normal_like(wrong)
    for name in ("normal_like", "uniform_like", "laplace_like"):
        with pytest.raises(TypeError, match="floating"):
            getattr(streams, name)(torch.zeros(4, 2, dtype=torch.int64))


# ---- secure streams, copies, printing ----------------------------------------------------------------


@each_draw
def test_secure_streams_never_repeat(draw):
    streams = Streams.secure(3)
    draws = [draw(s) for s in (streams, streams, streams.fold("a"), streams.fold("a"), streams.rows([0, 0, 0]))]
    # Six numbers have 720 orders: a single row may repeat, three rows all but never do.
    for left, right in itertools.combinations(draws, 2):
        assert not torch.equal(left, right)


def test_secure_counts():
    assert Streams.secure(3).count == 3
    assert Streams.secure([5, 9]).count == 2
    assert Streams.secure([5, 9, 11]).rows([0, 2]).fold("a", 1).count == 2


def test_pickles_carry_keys():
    streams = Streams.seeded(2**90, [1, 5], "a").fold(3).rows([1])
    assert equal(draw_everything(pickle.loads(pickle.dumps(streams))), draw_everything(streams))


def test_pickles_do_not_repeat_noise():
    streams = Streams.seeded(1, range(2))
    streams.rows([0]).normal(1)
    for send in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(FedveilError, match="send a fold"):
            send(streams)
    assert key(pickle.loads(pickle.dumps(streams.fold("worker")))) == key(streams.fold("worker"))


def test_secure_streams_are_not_sent():
    with pytest.raises(FedveilError, match="in the process that draws"):
        pickle.dumps(Streams.secure(2))


def test_repr_shows_no_key():
    assert repr(Streams.seeded(123456, [77], "secret")) == "Streams(1 clients, seeded)"
    assert repr(Streams.secure(2)) == "Streams(2 clients, secure)"


def sfc64(key, count):
    """SFC64 in plain Python: three words of state and a counter, with twelve rounds to mix the key in."""
    a, b, c, counter, mask = *key, 1, 2**64 - 1
    drawn = []
    for _ in range(12 + count):
        drawn.append((a + b + counter) & mask)
        counter += 1
        a, b, c = b ^ (b >> 11), (c + (c << 3)) & mask, (((c << 24) | (c >> 40)) + drawn[-1]) & mask
    return drawn[12:]


def test_keyed_words_are_those_of_sfc64():
    """The whole key reaches the generator, in its place."""
    from fedveil.streams import _encode, _Lineage

    key = np.frombuffer(_Lineage(_encode(7), _encode("a")).key(3), "<u8").tolist()
    assert len(key) == 3
    streams = Streams.seeded(7, [3], "a")
    assert [int(streams.key64()) % 2**64 for _ in range(20)] == sfc64(key, 20)


def test_torch_takes_the_whole_state_of_its_generator():
    """Torch's state has no documented layout: NumPy's generator of the same kind must draw the same words."""
    words = np.random.default_rng(1).integers(2**32, size=624, dtype=np.uint32)
    other = np.random.MT19937()
    other.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    generator = torch.Generator()
    generator.set_state(twister_state(words))
    drawn = torch.empty(2000, dtype=torch.int32).random_(generator=generator)
    assert np.array_equal(drawn.numpy(), other.random_raw(2000) % 2**31)


# ---- chance ------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("probability", [0.0, 2.0**-30, 0.2, 0.5, 0.8, 1.0])
def test_chance_has_its_probability(streams, probability):
    count = 100_000
    hits = streams().chance(probability, count).sum(1)
    low, high = stats.binom.interval(1 - 1e-6, count, probability)
    assert ((low <= hits) & (hits <= high)).all()


def test_chance_rounds_up_to_a_multiple_of_the_smallest_step(monkeypatch):
    from fedveil import streams as module

    streams = Streams.seeded(1, [0])
    words = np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    monkeypatch.setattr(module._KeyedSource, "words", lambda self, count: words)
    assert streams.chance(0.0, 5).tolist() == [[False] * 5]
    assert streams.chance(5e-324, 5).tolist() == [[True, False, False, False, False]]
    assert streams.chance(0.5, 5).tolist() == [[True, True, True, False, False]]
    assert streams.chance(1 - 2.0**-53, 5).tolist() == [[True, True, True, True, False]]
    assert streams.chance(1.0, 5).tolist() == [[True] * 5]


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_chance_refuses_what_is_no_probability(probability):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Streams.seeded(1, [0]).chance(probability, 3)
