"""SPM: Algorithm 2 by its closed forms, what its guarantee covers and what not, and what an attacker makes of it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional as F

import fedveil as fv
from fedveil.attacks.match import cosine
from fedveil.defenses.base import Facts
from fedveil.defenses.guarantee import Exposure, PureLDP
from fedveil.defenses.pnpm import PNPM
from fedveil.defenses.spm import SPM
from fedveil.errors import FedveilError
from fedveil.federation.capture import step_weight
from fedveil.registry import models
from fedveil.streams import Streams, _SystemSource
from fedveil.tree import Tree

from .laws import make_call

BUDGETS = pytest.mark.parametrize("epsilon", [0.3, 0.6, 1.9, 3.9])  # the paper's
DEBIAS = pytest.mark.parametrize("debias", [False, True])


def protect(defense, update, seed=0):
    return defense.protect(update, make_call(clients=update.count, seed=seed))


def draws(defense, value, count=400_000, dtype=torch.float64, seed=0):
    """The mechanism on many entries of one value."""
    return protect(defense, Tree({"w": torch.full((1, count), value, dtype=dtype)}), seed)["w"][0]


def bias(epsilon):
    return math.exp(epsilon) / (math.exp(epsilon) + 1)


def density(y, omega, epsilon):
    """The exact density of SPM's output, from Algorithm 2's probabilities."""
    e, size = math.exp(epsilon), abs(omega)
    c = (e + 1) / (e - 1)
    inside = size <= abs(y) <= c * size
    share = e / (e + 1) if y * omega > 0 else 1 / (e + 1)
    return share / ((c - 1) * size) if inside else 0.0


# ---- Algorithm 2 ----------------------------------------------------------------------------------------


@BUDGETS
@pytest.mark.parametrize("value", [0.7, -0.02])
def test_support_and_share_of_kept_signs(epsilon, value):
    sent = draws(SPM(epsilon=epsilon), value)
    c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
    factor = (sent / value).abs()
    assert factor.min() >= 1 - 1e-12
    assert factor.max() <= c + 1e-12
    assert stats.kstest(factor[:50_000].numpy(), stats.uniform(1, c - 1).cdf).pvalue > 1e-4
    kept, expected = float((sent / value > 0).double().mean()), bias(epsilon)
    assert abs(kept - expected) < 4.5 * (expected * (1 - expected) / len(sent)) ** 0.5


@BUDGETS
@DEBIAS
@pytest.mark.parametrize("value", [0.5, -2.0])
def test_mean_and_variance_are_the_closed_forms(epsilon, debias, value):
    sent = draws(SPM(epsilon=epsilon, debias=debias), value)
    a, b = math.exp(epsilon) - 1, bias(epsilon)
    second = 1 + 2 / a + 4 / (3 * a**2)
    mean, variance = (1.0, second / b**2 - 1) if debias else (b, second - b**2)
    assert abs(float(sent.mean()) - mean * value) < 4.5 * abs(value) * (variance / len(sent)) ** 0.5
    assert float(sent.var()) == pytest.approx(variance * value**2, rel=0.02)
    said = SPM(epsilon=epsilon, debias=debias)
    assert said.mean == pytest.approx(mean)
    assert said.variance == pytest.approx(variance)


def test_the_numbers_at_the_papers_budget():
    assert SPM(epsilon=0.3).mean == pytest.approx(0.574, abs=5e-4)
    assert SPM(epsilon=0.3).variance == pytest.approx(17.28, abs=0.01)
    assert SPM(epsilon=0.3, debias=True).variance == pytest.approx(52.4, abs=0.05)
    assert SPM(epsilon=0.3).stretch + 1 == pytest.approx(6.7, abs=0.05)
    assert SPM(epsilon=3.9).stretch + 1 == pytest.approx(1.04, abs=0.005)


def test_the_published_density_and_variance_are_not_those_of_the_algorithm():
    e = math.exp(0.3)
    p, c = (e - 1) / 2, (e + 1) / (e - 1)  # Eq. 3
    assert (p + p / e) * (c - 1) == pytest.approx(1 + 1 / e)  # more than one
    published = (3 * e + 1 / (3 * e) - 2 / 3) / (e - 1) ** 2  # (A17)
    assert published < 4 * e / (e - 1) ** 2  # below what any unbiased mechanism for a sign can reach
    assert SPM(epsilon=0.3, debias=True).variance > published


def test_draws_are_independent_over_entries_tensors_and_clients():
    sent = protect(SPM(), Tree({"a": torch.ones(2, 20_000), "b": torch.ones(2, 20_000)}))
    rows = torch.cat([sent["a"], sent["b"], sent["a"][:1].roll(1, 1)])
    correlation = torch.corrcoef(rows) - torch.eye(5)
    assert correlation.abs().max() < 4.5 / 20_000**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_stay_zero(dtype):
    update = Tree({"w": torch.tensor([[0.0, 1.0, -0.0, 2.0]] * 3, dtype=dtype)})
    for defense in (SPM(), SPM(debias=True), SPM(epsilon=1e-3), PNPM()):
        sent = protect(defense, update)["w"]
        assert sent.dtype == dtype
        assert torch.equal(sent == 0, update["w"] == 0)


def test_integers_are_refused():
    update = Tree({"w": torch.ones(1, 3), "steps": torch.arange(3)[None]})
    with pytest.raises(FedveilError, match="the parameter 'steps' is of type int64"):
        protect(SPM(), update)


@given(
    epsilon=st.floats(1e-3, 50),
    size=st.floats(1e-30, 1e30),
    sign=st.sampled_from([-1, 1]),
    debias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_support_at_any_budget_and_size(epsilon, size, sign, debias, dtype):
    defense = SPM(epsilon=epsilon, debias=debias)
    value = torch.tensor(sign * size, dtype=dtype)
    sent = draws(defense, value.item(), 200, dtype)
    assert sent.dtype == dtype
    factor = sent.double() / value.double() * defense.divisor
    c = 1 / math.tanh(epsilon / 2)
    slack = 1e-5 if dtype == torch.float32 else 1e-12
    assert factor.abs().min() >= 1 - slack
    assert factor.abs().max() <= c * (1 + slack)
    assert 0 <= defense.variance < math.inf
    assert defense.mean == pytest.approx(1 if debias else 1 / (1 + math.exp(-epsilon)), rel=1e-9)


def test_rare_flips_are_not_lost_in_rounding():
    """In single precision a sign would never flip at a large ε, and the likelihood ratio would be infinite."""

    rare = SPM(epsilon=30).flip
    assert rare == pytest.approx(math.exp(-30))

    class Rare(_SystemSource):
        def words(self, count):
            return np.full(count, int(rare * 2**64), np.uint64)

    assert Streams(None, (0,), [Rare()]).chance(rare, 4).all()
    assert not Streams(None, (0,), [Rare()]).chance(rare / 1.01, 4).any()


# ---- what is promised -----------------------------------------------------------------------------------


@BUDGETS
def test_samples_follow_the_exact_density(epsilon):
    value = 0.8
    sent = draws(SPM(epsilon=epsilon), value, 100_000)
    c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
    size = torch.linspace(value, c * value, 21, dtype=torch.float64)
    edges = torch.cat([-size.flip(0), size])
    counts = torch.histogram(sent, edges).hist
    middles = (edges[1:] + edges[:-1]) / 2
    expected = torch.tensor([density(float(m), value, epsilon) for m in middles]) * edges.diff() * len(sent)
    used = expected > 0
    assert counts[~used].sum() == 0
    assert expected.sum() == pytest.approx(len(sent), rel=1e-6)
    assert stats.chisquare(counts[used], expected[used], sum_check=False).pvalue > 1e-4


@BUDGETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mechanism", [SPM, PNPM])
def test_what_is_drawn_for_both_signs_keeps_to_the_ratio_and_reaches_it(epsilon, dtype, mechanism):
    plus, minus = (
        draws(mechanism(epsilon=epsilon), sign, 100_000, dtype, seed) for seed, sign in enumerate((1.0, -1.0))
    )
    share, other = float((plus > 0).double().mean()), float((minus > 0).double().mean())
    slack = 4.5 / (100_000 * other) ** 0.5
    assert math.log(share / other) == pytest.approx(epsilon, abs=slack)
    # The size has the same law for both: it tells nothing of the sign.
    assert stats.ks_2samp(plus.abs().numpy(), minus.abs().numpy()).pvalue > 1e-4


@BUDGETS
def test_the_likelihood_ratio_is_bounded_between_signs_only(epsilon):
    c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
    grid = [s * float(y) for y in torch.linspace(1.0, c, 50)[1:-1] for s in (-1, 1)]
    ratios = [density(y, 1.0, epsilon) / density(y, -1.0, epsilon) for y in grid]
    assert max(ratios) == pytest.approx(math.exp(epsilon))
    assert min(ratios) == pytest.approx(math.exp(-epsilon))
    # Between sizes there is no bound: what ω sends, a larger one never does.
    between = (1 + min(c, 2)) / 2
    assert density(between, 1.0, epsilon) > 0
    assert density(between, min(c, 2), epsilon) == 0
    sent = draws(SPM(epsilon=epsilon), 1.0).abs()
    assert (sent < between).any()
    assert not (draws(SPM(epsilon=epsilon), min(c, 2)).abs() < between).any()


def test_the_guarantee_says_what_is_not_covered():
    promise = SPM(epsilon=0.3).guarantee(Exposure(203_530, 50, 1, 0.6))
    assert promise.sentence == (
        "Formal guarantee: ε = 0.3 per entry's sign and round; sizes are not covered, each goes out times a factor "
        "between 1 and 6.72."
    )
    assert promise.mechanism == PureLDP(0.3, coordinates=203_530)
    assert "sign" in promise.protects
    assert promise.caveat == "Sizes are not covered, each goes out times a factor between 1 and 6.72."
    assert "between 1.74 and 11.7" in SPM(epsilon=0.3, debias=True).guarantee(Exposure(10, 2, 1, 1.0)).caveat
    assert "per entry's sign and update;" in SPM(epsilon=0.5).guarantee(Exposure(100, 2, 30, 1.0)).sentence


def test_it_protects_every_kind_of_message():
    for kind in ("gradient", "weights", "delta"):
        fv.Chain.of("spm").check_message(kind)


# ---- what an attacker makes of it -------------------------------------------------------------------------


def gradients(clients=4, model="mlp"):
    """True one-sample gradients of a network on images with black parts."""
    torch.manual_seed(0)
    built = models.build(model).build((1, 8, 8), 10)
    rows, images = [], torch.rand(clients, 1, 8, 8) * (torch.rand(clients, 1, 8, 8) > 0.5)
    for image in images:
        loss = F.cross_entropy(built(image[None]), torch.tensor([3]))
        found = torch.autograd.grad(loss, list(built.parameters()))
        rows.append({name: g for (name, _), g in zip(built.named_parameters(), found, strict=True)})
    return Tree.stack(rows), images, dict(built.named_parameters())


def error(estimate, truth):
    return float((estimate - truth).norm().square().mean() / truth.norm().square().mean())


@BUDGETS
@DEBIAS
@pytest.mark.parametrize("kind", ["gradient", "delta"])
def test_the_informed_estimate_is_closer(epsilon, debias, kind):
    truth, _, _ = gradients()
    defense = SPM(epsilon=epsilon, debias=debias)
    sent = protect(defense, truth)
    known = defense.knowledge(sent, Facts(kind=kind))
    assert error(known.target, truth) < error(sent, truth)
    right = (math.exp(epsilon) - 1) / (math.exp(epsilon) + 1)
    for name, tensor in sent.items():
        expected = torch.where(tensor == 0, 1.0, right)
        torch.testing.assert_close(known.weight[name], expected)
    weighted = known.weight.combine((known.target - truth).map(torch.square), torch.mul)
    assert sum(t.sum() for t in weighted.values()) < error(sent, truth) * truth.norm().square().sum()


@pytest.mark.parametrize("epsilon", [0.3, 1.9, 3.9, 6.0, 50.0])
@pytest.mark.parametrize("lr, steps, momentum", [(0.1, 1, 0.0), (0.01, 4, 0.9)])
def test_on_weights_the_change_shows_to_whoever_sent_them(epsilon, lr, steps, momentum):
    truth, _, params = gradients()
    before = Tree.expand({name: p.detach() for name, p in params.items()}, truth.count)
    defense, scale = SPM(epsilon=epsilon), step_weight((lr,) * steps, momentum)
    observed = (before - protect(defense, before - truth * scale)) / scale
    known = defense.knowledge(observed, Facts(kind="weights", lr=lr, steps=steps, momentum=momentum, before=before))
    matched = 1 - cosine(truth.row(0), known.target.row(0), known.weight.row(0))
    plain = 1 - cosine(truth.row(0), observed.row(0), observed.map(torch.ones_like).row(0))
    if epsilon == 50:  # nothing flips, nothing may be lost
        assert error(known.target, truth) < 1e-6
        assert matched > 0.999
    else:
        assert error(known.target, truth) < min(1.0, error(observed, truth) / 10)
        assert matched > 0.7 > plain + 0.2


def test_an_attacker_who_is_not_told_the_weights_takes_them_as_they_came():
    observed, _, _ = gradients()
    known = SPM().knowledge(observed, Facts(kind="weights"))
    assert all(torch.equal(known.target[name], observed[name]) for name in observed)


def test_sizes_alone_give_the_input_of_a_first_linear_layer():
    """The weakness named first: no sign is needed to see the picture, at the paper's smallest budget."""
    truth, images, _ = gradients()
    name = next(iter(truth))
    sizes = protect(SPM(epsilon=0.3), truth)[name].abs().mean(1)  # mean over the units: (K, 64)
    for size, image in zip(sizes, images.flatten(1), strict=True):
        assert torch.equal(size == 0, image == 0)
        assert torch.corrcoef(torch.stack([size, image]))[0, 1] > 0.95


def test_measures():
    update = Tree({"w": torch.randn(2, 200_000, generator=torch.Generator().manual_seed(0))})
    defense = SPM(epsilon=1.0)
    sent = protect(defense, update)
    said = defense.measures(update)
    cosine = float((sent.dot(update) / (sent.norm() * update.norm())).mean())
    assert said["predicted cosine of what is sent to what it was"] == pytest.approx(cosine, rel=0.01)
    assert said["predicted mean of an entry over its true value"] == pytest.approx(bias(1.0))
    assert said["probability that a sign is right"] == pytest.approx(bias(1.0))


# ---- in a federation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"protocol": "fedavg"}, {"protocol": "fedavg", "upload": "delta"}, {}])
def test_a_round_on_digits(settings):
    task = fv.task("digits", model="mlp", clients=4, limit=200)
    plan = fv.FederationSettings(rounds=1, batch_size=16, **settings)
    plain, spm, weak = (fv.federate(task, d, plan) for d in (None, SPM(), SPM(epsilon=50)))
    assert all(torch.isfinite(p).all() for p in spm.params.values())
    assert any(not torch.equal(spm.params[n], plain.params[n]) for n in plain.params)
    for name in plain.params:
        torch.testing.assert_close(weak.params[name], plain.params[name])


def test_the_guard_uploads_it():
    model = torch.nn.Linear(3, 2)
    guard = fv.Guard(model, F.cross_entropy, SPM(), seed=0)
    guard.new_round()
    sent = guard.upload()
    assert all((sent[name].abs() >= p.detach().abs() * (1 - 1e-6)).all() for name, p in model.named_parameters())
