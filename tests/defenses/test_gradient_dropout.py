"""Gradient Dropout: Algorithm 1 by its closed forms, and how well an attacker tells decoys from gradients."""

import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

from fedveil.defenses.base import Facts
from fedveil.defenses.gradient_dropout import DOUBT, GradientDropout, kept_posterior
from fedveil.registry import models
from fedveil.tree import Tree

from .laws import EXPOSURE, make_call

KEEPS = pytest.mark.parametrize("keep", [0.1, 0.6, 0.96])


def heavy_tailed(clients, entries, scale, seed=0):
    draws = stats.t(3).rvs((clients, entries), random_state=seed)
    return Tree({"g": torch.tensor(draws * scale, dtype=torch.float32)})


def protect(defense, update, seed=0):
    return defense.protect(update, make_call(clients=update.count, seed=seed))


def lenet_gradients(batch_size, clients=1):
    """True gradients of the inversion literature's LeNet on noise images."""
    torch.manual_seed(0)
    model = models.build("lenet").build((1, 28, 28), 10)
    rows = []
    for _ in range(clients):
        loss = F.cross_entropy(model(torch.rand(batch_size, 1, 28, 28)), torch.randint(0, 10, (batch_size,)))
        found = torch.autograd.grad(loss, list(model.parameters()))
        rows.append({name: g for (name, _), g in zip(model.named_parameters(), found, strict=True)})
    return Tree.stack(rows)


# ---- Algorithm 1 ----------------------------------------------------------------------------------------


@KEEPS
def test_kept_entries_are_exactly_scaled_and_their_share_is_keep(keep):
    update = Tree({"w": torch.full((2, 200, 100), 1e3) + torch.arange(100), "b": torch.full((2, 3_000), 1e3)})
    shared = protect(GradientDropout(keep=keep), update)
    for name in update:
        kept = shared[name] == update[name] / keep
        assert (shared[name][~kept].abs() < 1).all()  # every other entry is a decoy
        for client in kept.flatten(1):
            share, deviation = float(client.float().mean()), (keep * (1 - keep) / client.numel()) ** 0.5
            assert abs(share - keep) < 4.5 * deviation


@KEEPS
def test_decoys_are_normal(keep):
    update = Tree({"w": torch.full((1, 40_000), 1e6)})
    shared = protect(GradientDropout(keep=keep, sigma=0.05), update)["w"]
    decoys = shared[shared.abs() < 1e3]
    assert len(decoys) > 1_000
    assert stats.kstest(decoys.numpy(), stats.norm(scale=0.05).cdf).pvalue > 1e-4


def test_masks_and_decoys_are_independent():
    update = Tree({"w": torch.full((1, 40_000), 1e6)})
    shared = protect(GradientDropout(keep=0.5, sigma=1.0), update)["w"][0]
    kept = (shared > 1e3).float()
    neighbors = torch.corrcoef(torch.stack([kept[1:], kept[:-1]]))[0, 1]
    assert abs(neighbors) < 4.5 / 40_000**0.5
    decoys = shared[shared < 1e3]
    assert abs(torch.corrcoef(torch.stack([decoys[1:], decoys[:-1]]))[0, 1]) < 4.5 / len(decoys) ** 0.5


@KEEPS
def test_unbiased(keep):
    update = Tree({"w": torch.linspace(-1, 1, 9).repeat(4_000, 1)})  # 4,000 clients with one gradient
    defense = GradientDropout(keep=keep, sigma=0.3)
    shared = protect(defense, update)["w"].double()
    deviation = ((1 - keep) / keep * update["w"][0].double() ** 2 + (1 - keep) * 0.3**2).sqrt() / 4_000**0.5
    assert ((shared.mean(0) - update["w"][0]).abs() < 4.5 * deviation).all()


@KEEPS
def test_error_per_entry_is_the_closed_form(keep):
    update = Tree({"w": torch.tensor([0.0, 0.1, -1.0, 3.0]).repeat(20_000, 1)})
    defense = GradientDropout(keep=keep, sigma=0.5)
    error = (protect(defense, update)["w"] - update["w"]).square().mean(0)
    predicted = (1 - keep) / keep * update["w"][0].square() + (1 - keep) * 0.25
    torch.testing.assert_close(error, predicted, rtol=0.05, atol=0)
    said = defense.measures(update)
    assert said["expected squared error per entry"] == pytest.approx(float(predicted.mean()), rel=1e-5)
    assert said["expected squared error of an update before the learning rate"] == pytest.approx(
        float(predicted.sum()), rel=1e-5
    )


@pytest.mark.parametrize("match_spread", [False, True])
@pytest.mark.parametrize("sigma", [5e-3, 0.5])
@KEEPS
def test_predicted_cosine_is_the_measured_one(keep, sigma, match_spread):
    generator = torch.Generator().manual_seed(0)
    update = Tree(
        {
            "w": 0.1 * torch.randn(3, 100_000, generator=generator),
            "b": 0.2 * torch.randn(3, 50_000, generator=generator),
        }
    )
    defense = GradientDropout(keep=keep, sigma=sigma, match_spread=match_spread)
    shared = [protect(defense, update, seed) for seed in range(4)]
    measured = torch.stack([s.dot(update) / (s.norm() * update.norm()) for s in shared]).mean()
    said = defense.measures(update)
    predicted = said["predicted cosine to the true gradient"]
    assert predicted == pytest.approx(float(measured), rel=0.01)
    assert predicted <= said["largest cosine this keep allows (√p)"] == pytest.approx(keep**0.5)


def test_match_spread_gives_decoys_each_tensors_own_spread():
    update = Tree({"small": torch.full((2, 20_000), 1e-4), "large": torch.full((2, 20_000), 50.0)})
    update = update * torch.tensor([1.0, 2.0])  # and each client's own
    shared = protect(GradientDropout(keep=0.5, match_spread=True), update)
    for name in update:
        for k in (0, 1):
            decoys = shared[name][k][shared[name][k] != update[name][k] / 0.5]
            assert stats.kstest(decoys.numpy(), stats.norm(scale=float(update[name][k, 0])).cdf).pvalue > 1e-4


def test_no_guarantee_is_claimed():
    promise = GradientDropout().guarantee(EXPOSURE)
    assert not promise.formal
    assert "not differentially private" in promise.sentence


# ---- what an attacker can tell ----------------------------------------------------------------------------


def judged(defense, update):
    """The posterior of every entry, and whether it was kept in truth."""
    shared = protect(defense, update)
    known = defense.knowledge(shared, Facts())
    kept = shared.combine(update, lambda s, g: s == g / defense.keep)
    return known, kept.flat().flatten(), believed(known.weight).flat().flatten()


def believed(weight):
    """The posterior behind the weights."""
    return weight.map(lambda w: 1 - DOUBT * (1 / w.double() - 1))


def worst_bin(posterior, kept, least=300):
    """The largest gap between what was believed and what was true, over bins of some size."""
    edges = torch.tensor([0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
    bins = torch.bucketize(posterior, edges)
    chosen = [bins == b for b in range(7) if (bins == b).sum() >= least]
    return max(abs(float(posterior[m].mean() - kept[m].float().mean())) for m in chosen)


def average_gap(posterior, kept):
    edges = torch.tensor([0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
    bins = torch.bucketize(posterior, edges)
    masks = [bins == b for b in bins.unique()]
    return sum(float(m.float().mean() * (posterior[m].mean() - kept[m].float().mean()).abs()) for m in masks)


@pytest.mark.parametrize("keep", [0.3, 0.8])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 1, 10, 100])
def test_posterior_is_calibrated_on_heavy_tailed_gradients(keep, ratio):
    defense = GradientDropout(keep=keep, sigma=5e-3)
    _, kept, posterior = judged(defense, heavy_tailed(2, 20_000, ratio * 5e-3))
    assert worst_bin(posterior, kept) < 0.1
    assert average_gap(posterior, kept) < 0.015


@pytest.mark.parametrize("keep", [0.3, 0.8])
def test_posterior_is_calibrated_with_decoys_of_the_tensors_own_spread(keep):
    normal = Tree({"g": 3.0 * torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))})
    _, kept, posterior = judged(GradientDropout(keep=keep, match_spread=True), normal)
    assert worst_bin(posterior, kept) < 0.04
    assert average_gap(posterior, kept) < 0.015


@pytest.mark.parametrize("keep, sigma", [(0.8, 5e-3), (0.6, 5e-2)])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_posterior_is_calibrated_on_the_gradients_of_a_network(keep, sigma, batch_size):
    _, kept, posterior = judged(GradientDropout(keep=keep, sigma=sigma), lenet_gradients(batch_size, clients=2))
    assert average_gap(posterior, kept) < 0.03
    assert worst_bin(posterior, kept) < 0.12
    assert roc_auc_score(kept, posterior) > 0.75


@pytest.mark.parametrize("ratio, least", [(0.01, 0.97), (10, 0.93), (100, 0.99)])
def test_decoys_stand_out_where_spreads_differ(ratio, least):
    _, kept, posterior = judged(GradientDropout(), heavy_tailed(2, 20_000, ratio * 5e-3))
    assert roc_auc_score(kept, posterior) > least


def test_weights_stay_near_the_prior_where_nothing_can_be_told():
    normal = Tree({"g": torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))})
    # Kept entries are g/keep: decoys of that very spread cannot be told apart.
    _, kept, posterior = judged(GradientDropout(keep=0.8, sigma=1 / 0.8), normal)
    assert abs(posterior.mean() - 0.8) < 0.01
    assert posterior.std() < 0.03
    assert roc_auc_score(kept, posterior) < 0.53


def test_matching_the_spread_takes_most_of_that_knowledge_away():
    update = lenet_gradients(16, clients=2)
    plain, matched = (judged(GradientDropout(match_spread=flag), update) for flag in (False, True))
    assert roc_auc_score(*plain[1:]) > 0.9
    assert roc_auc_score(*matched[1:]) < 0.75


def test_the_target_is_the_true_gradient_where_entries_were_kept():
    update = heavy_tailed(2, 1_000, 1.0)
    known, kept, _ = judged(GradientDropout(keep=0.7), update)
    torch.testing.assert_close(known.target.flat().flatten()[kept], update.flat().flatten()[kept])


def test_tensors_are_judged_each_by_their_own_spread():
    update = Tree({**heavy_tailed(1, 5_000, 10.0, seed=1)})
    both = Tree({"large": update["g"], "small": update["g"] * 1e-6})
    defense = GradientDropout(sigma=5e-3)
    shared = protect(defense, both)
    weight = defense.knowledge(shared, Facts()).weight
    for name in both:
        kept = shared[name] == both[name] / 0.8
        assert roc_auc_score(kept.flatten(), weight[name].flatten()) > 0.98


def test_a_sure_entry_outweighs_the_doubtful_ones():
    """Trust is the inverse of an entry's error: certainty weighs 1, ignorance next to nothing."""
    weight = (
        GradientDropout(sigma=5e-3)
        .knowledge(Tree({"g": torch.tensor([[100.0] * 80 + [5e-3] * 20])}), Facts())
        .weight["g"]
    )
    assert (weight[0, :80] > 0.99).all()
    assert (weight[0, 80:] < 0.1).all()
    equal = GradientDropout(keep=0.5, sigma=1 / 0.5)
    normal = Tree({"g": torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))})
    weight = equal.knowledge(protect(equal, normal), Facts()).weight["g"]
    assert weight.mean() == pytest.approx(DOUBT / (0.5 + DOUBT), rel=0.1)


# ---- edges of the posterior -------------------------------------------------------------------------------

EDGES = {
    "zeros": torch.zeros(2, 50),
    "one entry": torch.tensor([[0.3], [0.0]]),
    "two entries": torch.tensor([[0.3, -1e-8], [0.0, 5.0]]),
    "constant": torch.full((2, 50), 0.7),
    "one client of zeros": torch.stack([torch.zeros(50), torch.linspace(-1, 1, 50)]),
    "tiny": torch.full((2, 50), 1e-30),
    "huge": torch.full((2, 50), 1e30),
    "one outlier": torch.cat([torch.full((2, 49), 1e-6), torch.full((2, 1), 1e6)], dim=1),
}


# With match_spread, sigma is not used; with keep=1 neither of them is.
DECOYS = [{"sigma": sigma} for sigma in (0.0, 1e-12, 5e-3, 1e6)] + [{"match_spread": True}]
KEPT = [{"keep": keep, **decoys} for keep in (1e-6, 0.8) for decoys in DECOYS] + [{"keep": 1.0}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fields", KEPT, ids=str)
@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
def test_posterior_is_a_probability_at_the_edges(values, fields, dtype):
    defense = GradientDropout(**fields)
    known = defense.knowledge(Tree({"g": values.to(dtype)}), Facts())
    weight = known.weight["g"]
    assert weight.dtype == dtype
    assert torch.isfinite(weight).all()
    assert ((weight >= 0) & (weight <= 1)).all()
    if defense.keep == 1:
        assert (weight == 1).all()


def test_without_noise_every_entry_but_zero_was_kept():
    update = Tree({"g": torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))})
    defense = GradientDropout(keep=0.8, sigma=0.0)
    shared = protect(defense, update)["g"]
    weight = defense.knowledge(Tree({"g": shared}), Facts()).weight["g"]
    assert torch.equal(weight == 1, shared != 0)
    posterior = believed(Tree({"g": weight}))["g"]
    assert posterior[shared == 0].max() < 0.02  # all zeros are decoys, up to chance
    # With as many true zeros as others: of 0.4 + 0.2 zeros 0.4 were kept.
    update["g"][:, ::2] = 0
    shared = protect(defense, update)["g"]
    posterior = believed(defense.knowledge(Tree({"g": shared}), Facts()).weight)["g"]
    assert posterior[shared == 0].mean() == pytest.approx(2 / 3, abs=0.01)


def test_with_noise_zeros_were_kept():
    """A decoy is never exactly zero: the gradients of dead units are known as such."""
    update = heavy_tailed(1, 10_000, 5e-3)
    update["g"][:, ::2] = 0
    defense = GradientDropout(keep=0.8, sigma=5e-3)
    shared = protect(defense, update)["g"]
    weight = defense.knowledge(Tree({"g": shared}), Facts()).weight["g"]
    assert (weight[shared == 0] == 1).all()
    kept = shared == update["g"] / 0.8
    assert worst_bin(believed(Tree({"g": weight}))["g"].flatten(), kept.flatten()) < 0.05


def test_a_large_tensor_is_judged_as_a_small_one():
    """The distribution is fitted to some of the entries only."""
    values = heavy_tailed(1, 200_000, 5e-2)["g"]
    decoy = torch.full((1, 1), 5e-3**2)
    whole, part = kept_posterior(values, 0.8, decoy), kept_posterior(values[:, :20_000], 0.8, decoy)
    torch.testing.assert_close(whole[:, :20_000], part, atol=0.05, rtol=0)


@pytest.mark.parametrize("match_spread", [False, True])
def test_silent_decoys_do_not_keep_the_sign_of_the_entry(match_spread):
    """−0.0 is a zero to every comparison, but goes out as another number than 0.0."""
    update = Tree({"w": torch.randn(2, 2_000, generator=torch.Generator().manual_seed(0))})
    defense = GradientDropout(keep=0.5, sigma=0.0, match_spread=match_spread)
    shared = protect(defense, update)["w"]
    assert not (torch.signbit(shared) & (shared == 0)).any()
    assert match_spread or (shared == 0).any()
