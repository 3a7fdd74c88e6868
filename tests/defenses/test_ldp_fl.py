"""LDP-FL: Duchi's mechanism in a fixed or adaptive range, and what the adaptive one gives away."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedveil as fv
from fedveil.defenses.base import Facts
from fedveil.defenses.guarantee import PureLDP
from fedveil.defenses.ldp_fl import LDPFL
from fedveil.errors import FedveilError
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call
from .moments import assert_variance

BUDGETS = pytest.mark.parametrize("epsilon", [0.3, 1.5, 5.0])


def protect(defense, update, seed=0):
    return defense.protect(update, make_call(clients=update.count, seed=seed))


def draws(defense, value, count=200_000, dtype=torch.float64):
    return protect(defense, Tree({"w": torch.full((1, count), value, dtype=dtype)}))["w"][0]


def factor(epsilon):
    return (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)


def upper(omega, center, radius, epsilon):
    """P(c + r·C), as the paper writes it, for the clamped weight."""
    omega, e = max(center - radius, min(center + radius, omega)), math.exp(epsilon)
    return ((omega - center) * (e - 1) + radius * (e + 1)) / (2 * radius * (e + 1))


@BUDGETS
@pytest.mark.parametrize("center, radius", [(0.0, 0.1), (-0.3, 0.05)])
@pytest.mark.parametrize("t", [-1.0, -0.3, 0.0, 0.8])
def test_support_mean_variance_and_odds(epsilon, center, radius, t):
    omega = center + t * radius
    sent = draws(LDPFL(epsilon=epsilon, center=center, radius=radius), omega)
    c = factor(epsilon)
    torch.testing.assert_close((sent - center).abs(), torch.full_like(sent, radius * c))
    variance = radius**2 * c**2 - (omega - center) ** 2
    assert abs(float(sent.mean()) - omega) < 4.5 * (variance / len(sent)) ** 0.5
    assert_variance(sent, variance)
    share = upper(omega, center, radius, epsilon)
    counts = [int((sent > center).sum()), int((sent < center).sum())]
    assert stats.chisquare(counts, [len(sent) * share, len(sent) * (1 - share)]).pvalue > 1e-4


@given(
    epsilon=st.floats(1e-3, 15),
    center=st.floats(-5, 5),
    radius=st.floats(1e-3, 10),
    omega=st.floats(-20, 20),
    other=st.floats(-20, 20),
)
def test_the_likelihood_ratio_of_any_two_inputs_is_bounded(epsilon, center, radius, omega, other):
    first, second = upper(omega, center, radius, epsilon), upper(other, center, radius, epsilon)
    for a, b in ((first, second), (1 - first, 1 - second)):
        assert a <= math.exp(epsilon) * b * (1 + 1e-6)


@pytest.mark.parametrize("value", [5.0, -1e6])
def test_values_outside_the_range_are_those_at_its_end(value):
    defense = LDPFL(epsilon=0.7, center=0.1, radius=0.5)
    assert torch.equal(draws(defense, value, 1000), draws(defense, 0.1 + math.copysign(0.5, value), 1000))


@given(
    epsilon=st.floats(1e-3, 50),
    center=st.floats(-10, 10),
    radius=st.floats(1e-3, 1e3),
    value=st.floats(-1e6, 1e6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    adaptive=st.booleans(),
)
def test_any_setting_gives_finite_values_of_the_same_type(epsilon, center, radius, value, dtype, adaptive):
    defense = LDPFL(epsilon=epsilon, center=center, radius=radius, adaptive=adaptive)
    sent = draws(defense, value, 50, dtype)
    assert sent.dtype == dtype
    assert sent.isfinite().all()
    if not adaptive:
        expected = torch.full((50,), radius / math.tanh(epsilon / 2), dtype=torch.float64)
        torch.testing.assert_close((sent.double() - center).abs(), expected, rtol=1e-5, atol=1e-5)


# ---- the adaptive range -----------------------------------------------------------------------------------


def layers():
    generator = torch.Generator().manual_seed(0)
    wide, narrow = torch.randn(2, 40, 30, generator=generator), 0.01 * torch.rand(2, 5_000, generator=generator)
    return Tree({"wide": wide.double(), "narrow": narrow.double()})


@BUDGETS
def test_an_adaptive_range_is_unbiased_and_goes_out_exactly(epsilon):
    update = layers()
    sent = [protect(LDPFL(epsilon=epsilon, adaptive=True), update, seed) for seed in range(40)]
    for name, tensor in update.items():
        low, high = tensor.flatten(1).amin(1), tensor.flatten(1).amax(1)
        for one in sent:
            seen = one[name].flatten(1)
            middle, width = (seen.amax(1) + seen.amin(1)) / 2, (seen.amax(1) - seen.amin(1)) / 2 / factor(epsilon)
            torch.testing.assert_close(middle - width, low)  # anyone can read the smallest and the largest value
            torch.testing.assert_close(middle + width, high)
        mean = torch.stack([one[name] for one in sent]).mean(0)
        deviation = (high - low).max() / 2 * factor(epsilon) / 40**0.5
        assert (mean - tensor).abs().max() < 6 * deviation
        assert abs(float((mean - tensor).mean())) < 4.5 * float(deviation) / tensor.numel() ** 0.5


def test_an_adaptive_range_sends_constant_layers_as_they_are():
    update = Tree(
        {"scalar": torch.tensor([0.3, -2.0]), "zeros": torch.zeros(2, 4), "one": torch.tensor([[0.5], [7.0]])}
    )
    sent = protect(LDPFL(adaptive=True), update)
    for name in update:
        torch.testing.assert_close(sent[name], update[name])
    assert (protect(LDPFL(), update)["zeros"] != 0).all()


def test_the_guarantee_says_what_an_adaptive_range_gives_away():
    fixed, adaptive = (LDPFL(epsilon=0.5, adaptive=flag).guarantee(EXPOSURE) for flag in (False, True))
    assert "ε = 0.5 per entry and round; " in fixed.sentence
    assert "any two values" in fixed.sentence
    assert "range, which goes out exactly and is not covered" in adaptive.sentence
    assert fixed.mechanism == adaptive.mechanism == PureLDP(0.5, coordinates=1000)


# ---- what an attacker makes of it, and a federation -------------------------------------------------------


@BUDGETS
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["weights", "delta"])
def test_the_informed_estimate_is_closer(epsilon, adaptive, center, kind):
    generator = torch.Generator().manual_seed(0)
    change = Tree({n: 0.02 * torch.randn(t.shape, generator=generator).double() for n, t in layers().items()})
    lr, steps = 0.1, 2
    truth = -change / (lr * steps)
    defense = LDPFL(epsilon=epsilon, center=center, radius=0.5, adaptive=adaptive)
    if kind == "weights":
        observed = (layers() - protect(defense, layers() + change)) / (lr * steps)
    else:
        observed = -protect(defense, change) / (lr * steps)
    known = defense.knowledge(observed, Facts(kind=kind, lr=lr, steps=steps))
    assert (known.target - truth).norm().sum() < (observed - truth).norm().sum()


def test_precise_layers_are_trusted_more():
    update = Tree({**layers(), "exact": torch.ones(2, 3).double()})
    defense = LDPFL(epsilon=1, adaptive=True)
    known = defense.knowledge(protect(defense, update), Facts(kind="gradient"))
    weight = {name: float(tensor.mean()) for name, tensor in known.weight.items()}
    assert weight["exact"] == 1
    assert weight["narrow"] > 1e3 * weight["wide"] > 0
    torch.testing.assert_close(known.target["exact"], update["exact"])


def test_gradients_are_refused_in_one_line():
    with pytest.raises(FedveilError, match=r"ldp-fl protects weights .*gradient: use the protocol fedavg"):
        fv.federate(fv.task("digits", model="mlp", clients=2, limit=40), LDPFL(), fv.FederationSettings(rounds=1))


def test_bad_fields_are_refused():
    with pytest.raises(FedveilError, match=r"epsilon must be greater than.*; radius must be greater"):
        LDPFL(epsilon=0, radius=0)
    with pytest.raises(FedveilError, match="center"):
        LDPFL(center=math.inf)


def test_measures():
    said = LDPFL(epsilon=0.3, radius=0.2).measures(Tree({"w": torch.ones(1, 3)}))
    assert said["predicted standard deviation of an entry"] == pytest.approx(0.2 * factor(0.3))


@pytest.mark.parametrize("upload", ["weights", "delta"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_round_on_digits(upload, adaptive):
    task = fv.task("digits", model="mlp", clients=4, limit=200)
    plan = fv.FederationSettings(protocol="fedavg", rounds=1, batch_size=16, upload=upload)
    run = fv.federate(task, LDPFL(epsilon=5, adaptive=adaptive), plan)
    assert all(torch.isfinite(p).all() for p in run.params.values())


# ---- a range per layer -----------------------------------------------------------------------------------------


LAYERS = Tree({"w": torch.full((2, 20_000), 0.3), "b": torch.full((2, 20_000), -0.02)})
RANGES = LDPFL(epsilon=1.0, centers=(0.2, 0.0), radii=(0.4, 0.05))


def test_every_tensor_goes_out_in_its_own_range():
    sent = protect(RANGES, LAYERS)
    for name, center, radius in (("w", 0.2, 0.4), ("b", 0.0, 0.05)):
        ends = [center - radius * factor(1.0), center + radius * factor(1.0)]
        torch.testing.assert_close(sent[name].unique(), torch.tensor(ends))
        assert float(sent[name].mean()) == pytest.approx(float(LAYERS[name].mean()), abs=5 * radius * factor(1.0) / 200)


def test_equal_ranges_for_all_are_the_one_range():
    one = protect(LDPFL(center=0.1, radius=0.3), Tree({"w": LAYERS["w"]}))
    each = protect(LDPFL(centers=(0.1,), radii=(0.3,)), Tree({"w": LAYERS["w"]}))
    assert torch.equal(one["w"], each["w"])


@pytest.mark.parametrize("kind", ["delta", "weights"])
def test_an_attacker_knows_the_ranges_and_trusts_the_narrow_ones(kind):
    facts = Facts(kind=kind, lr=0.5)
    sent = protect(RANGES, LAYERS)
    observed = sent * (-1 / facts.step_scale)
    known = RANGES.knowledge(observed, facts)
    share = math.tanh(0.5) ** 2 / 3
    assert known.weight["b"].unique().item() == pytest.approx(share)
    assert known.weight["w"].unique().item() == pytest.approx(share / 64)  # (0.05/0.4)²
    middle = 0.0 if kind == "weights" else -0.2 / facts.step_scale
    torch.testing.assert_close(known.target["w"], middle + share * (observed["w"] - middle))


def test_measures_are_those_of_all_entries():
    found = RANGES.measures(LAYERS)["predicted standard deviation of an entry"]
    assert found == pytest.approx(math.sqrt((0.4**2 + 0.05**2) / 2) * factor(1.0))


def test_ranges_that_do_not_fit_the_model_are_refused_before_training():
    task = fv.task("digits", model="mlp:hidden=[4]", clients=4)
    for field in ("radii", "centers"):
        with pytest.raises(FedveilError, match=f"ldp-fl: {field} has 2 numbers, but the model has 4 parameter tensors"):
            fv.federate(task, f"ldp-fl:{field}=[0.1,0.2]", fv.FederationSettings(protocol="fedavg", rounds=1))
    with pytest.raises(FedveilError, match="leave centers and radii out"):
        LDPFL(adaptive=True, radii=(0.1,))
