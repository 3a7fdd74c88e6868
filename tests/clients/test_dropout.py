"""Keyed dropout: the masks are the published hash, look random in every direction, and scale what they keep."""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import vmap

from fedveil.clients import dropout
from fedveil.clients.dropout import KeyedDropout, example_key, keyed_uniform, with_keyed_dropout
from fedveil.streams import Streams

from .plain import plain_example_key, plain_uniform

KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321987654321]


def key(value):
    return torch.tensor(value, dtype=torch.int64)


def keys(count, seed=0):
    return Streams.seeded(seed, range(count), "masks").key64()


def uniforms(count, size, seed=0):
    return torch.stack([keyed_uniform(k, size) for k in keys(count, seed)])


def drop(module, value, inputs):
    module.key.copy_(key(value))
    return module(inputs)


# ---- the hash -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", KEYS)
def test_uniform_numbers_are_those_of_the_hash(value):
    assert keyed_uniform(key(value), 300).tolist() == plain_uniform(value, 300)


@pytest.mark.parametrize("value", KEYS)
@pytest.mark.parametrize("place", [0, 1, 2, 100])
def test_example_keys_are_those_of_the_hash(value, place):
    expected = key((plain_example_key(value, place) + 2**63) % 2**64 - 2**63)
    assert example_key(key(value), place) == expected
    assert example_key(key(value), torch.tensor(place)) == expected


def test_the_constants_are_the_published_ones():
    assert dropout._GOLDEN % 2**64 == 0x9E3779B97F4A7C15
    assert dropout._MIX1 % 2**64 == 0xBF58476D1CE4E5B9
    assert dropout._MIX2 % 2**64 == 0x94D049BB133111EB
    # splitmix64 with the seed 1234567 gives this first number (Rosetta Code).
    state = (1234567 + 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    assert dropout._mix(key(state)).item() % 2**64 == 6457827717110365317


# ---- that it looks random -----------------------------------------------------------------------------


def test_numbers_are_uniform():
    values = uniforms(50, 2_000).flatten()
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-4


def test_every_bit_is_balanced():
    """A chi-square of ones and zeros for each of the 24 bits, over keys and over positions."""
    bits = (uniforms(100, 1_000).double() * 2**24).to(torch.int64)
    for place in range(24):
        ones = int(((bits >> place) & 1).sum())
        assert stats.chisquare([ones, bits.numel() - ones]).pvalue > 1e-5, place


@pytest.mark.parametrize("lag", [1, 2, 7, 28, 64, 512])
def test_positions_are_independent(lag):
    values = uniforms(60, 2_000) - 0.5
    products = (values[:, lag:] * values[:, :-lag]).flatten() * 12  # correlation 0, variance 1
    assert abs(products.mean()) < 4.5 / math.sqrt(len(products))


@pytest.mark.parametrize("step", [1, 2, 256])
def test_neighboring_keys_are_independent(step):
    """A layer used twice moves its key on by 1: the masks must not resemble each other."""
    base = 1_000_003
    first = torch.stack([keyed_uniform(key(base + i), 2_000) for i in range(0, 40 * 512, 512)]) - 0.5
    second = torch.stack([keyed_uniform(key(base + i + step), 2_000) for i in range(0, 40 * 512, 512)]) - 0.5
    products = (first * second).flatten() * 12
    assert abs(products.mean()) < 4.5 / math.sqrt(len(products))


def test_masks_of_clients_are_independent():
    masks = (uniforms(40, 4_000) < 0.5).double() - 0.5
    shared = (masks @ masks.T / 4_000 * 4).triu(1)
    pairs = 40 * 39 // 2
    assert abs(shared).max() < stats.norm.isf(1e-4 / pairs) / math.sqrt(4_000)
    counts = [int(((masks[0] > 0) == a).logical_and((masks[1] > 0) == b).sum()) for a in (0, 1) for b in (0, 1)]
    assert stats.chisquare(counts).pvalue > 1e-5


# ---- the layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_kept_and_scale(p):
    inputs = torch.full((200, 500), 3.0)
    output = drop(KeyedDropout(p, spatial=0), 5, inputs)
    kept = output != 0
    assert abs(kept.float().mean() - (1 - p)) < 4.5 * math.sqrt(p * (1 - p) / inputs.numel())
    torch.testing.assert_close(output[kept], inputs[kept] / (1 - p))


@pytest.mark.filterwarnings("ignore:dropout2d")
@pytest.mark.parametrize(
    "kind, shape, axes",
    [
        (nn.Dropout, (6, 40), 2),
        (nn.Dropout, (6, 5, 4, 3), 4),
        (nn.Dropout1d, (30, 20, 4), 2),
        (nn.Dropout1d, (60, 4), 1),
        (nn.Dropout2d, (30, 20, 4, 5), 2),
        (nn.Dropout2d, (30, 20, 4), 2),
        (nn.Dropout3d, (30, 20, 2, 3, 4), 2),
        (nn.Dropout3d, (60, 2, 3, 4), 1),
    ],
)
def test_whole_channels_are_dropped_as_torch_drops_them(kind, shape, axes):
    """Counted in torch's own layer too: which trailing axes are always dropped together."""
    torch.manual_seed(0)
    keyed, _ = with_keyed_dropout(nn.Sequential(kind(0.5)))
    for layer in (kind(0.5), keyed):
        kept = (layer(torch.ones(shape)) != 0).flatten(axes) if axes < len(shape) else layer(torch.ones(shape)) != 0
        if axes < len(shape):
            assert torch.equal(kept.all(-1), kept.any(-1))
            kept = kept.any(-1)
        assert 0.3 < kept.float().mean() < 0.7
        for axis in range(kept.dim()):  # and along no other axis
            assert not torch.equal(kept.any(axis), kept.all(axis))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_extremes(p):
    output = drop(KeyedDropout(p, spatial=0), 1, torch.ones(50))
    assert torch.equal(output, torch.full((50,), 1 - p))


def test_nothing_is_dropped_in_eval_mode():
    layer = KeyedDropout(0.5, spatial=0).eval()
    assert torch.equal(drop(layer, 1, torch.ones(50)), torch.ones(50))
    assert layer.key == 1  # nor is the key moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_the_type(dtype):
    layer = KeyedDropout(0.3, spatial=0)
    masks = [drop(layer, 1, torch.ones(200, dtype=kind)) != 0 for kind in (dtype, torch.float32)]
    assert torch.equal(*masks)
    assert drop(layer, 1, torch.ones(9, dtype=dtype)).dtype == dtype


def test_the_same_key_gives_the_same_mask_under_vmap():
    layer = KeyedDropout(0.4, spatial=0)
    several = keys(6)
    inputs = torch.ones(6, 5, 7)

    def run(key, x):
        return torch.func.functional_call(layer, {"key": key.clone()}, (x,))

    together = vmap(run, randomness="error")(several, inputs)
    assert torch.equal(together, torch.stack([run(k, x) for k, x in zip(several, inputs, strict=True)]))
    assert len({tuple((row != 0).flatten().tolist()) for row in together}) == 6


def test_a_layer_used_twice_in_a_pass_draws_twice():
    layer = KeyedDropout(0.5, spatial=0)
    first = drop(layer, 3, torch.ones(100))
    second = layer(torch.ones(100))
    assert not torch.equal(first, second)
    assert torch.equal(second, drop(layer, 4, torch.ones(100)))


# ---- swapping -----------------------------------------------------------------------------------------


def test_swaps_a_copy_and_names_the_keys():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Sequential(nn.Dropout2d(0.2), nn.ReLU())).train()
    model[1].eval()
    made, names = with_keyed_dropout(model)
    assert type(model[1]) is nn.Dropout
    assert names == ["1.key", "2.0.key"]
    assert (made[1].p, made[2][0].p) == (0.1, 0.2)
    assert (made[1].training, made[2][0].training) == (False, True)
    assert made[0].weight is not model[0].weight
    assert list(made.state_dict()) == list(model.state_dict())  # a checkpoint fits either


def test_a_model_that_is_one_dropout_layer():
    made, names = with_keyed_dropout(nn.Dropout(0.5))
    assert isinstance(made, KeyedDropout)
    assert names == ["key"]


def test_a_layer_under_two_names_stays_one():
    shared = nn.Dropout(0.5)
    made, names = with_keyed_dropout(nn.Sequential(shared, nn.Sequential(shared), shared))
    assert names == ["0.key"]
    assert made[0] is made[1][0] is made[2]


def test_other_layers_stay_as_they_are():
    made, names = with_keyed_dropout(nn.Sequential(nn.AlphaDropout(0.5), nn.ReLU()))
    assert names == []
    assert type(made[0]) is nn.AlphaDropout
