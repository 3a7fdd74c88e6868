"""The one call that computes every metric."""

import math

import pytest
import torch
from torch import Tensor

from fedveil.leakage import metrics
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.identified import identified
from fedveil.leakage.score import gray_gaps, score

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(*shape: int, seed: int = 0) -> Tensor:
    pixels = torch.rand(*shape, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    return metrics.from_pixels(pixels, MEAN, STD)


class Means:
    """A stand-in for a classifier: the mean of each channel, and twice that."""

    def features(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def logits(self, x: Tensor) -> Tensor:
        return 2 * x.mean((2, 3))


def pixel_distance(x: Tensor, y: Tensor) -> Tensor:
    assert min(x.min(), y.min()) >= 0
    assert max(x.max(), y.max()) <= 1
    return (x - y).abs().flatten(1).mean(1).double()


def test_all_metrics_in_one_call() -> None:
    original, found, distractors = images(4), images(4, seed=1), images(4, 5, seed=2)
    iterates, prior = images(3, 4, seed=3), torch.full((4,), 0.1)
    loss = torch.arange(4.0)
    values = score(
        found,
        original,
        MEAN,
        STD,
        distractors,
        reference=Means(),
        lpips=pixel_distance,
        iterates=iterates,
        attack_loss=loss,
        prior_ssim=prior,
    )
    assert set(values) == set(METRICS)
    assert all(value.shape == (4,) for value in values.values())
    # Shares are booleans, which is how an interval knows them.
    assert {name for name, value in values.items() if value.dtype == torch.bool} == {
        name for name, metric in METRICS.items() if metric.share
    }
    x, y = (metrics.to_pixels(each, MEAN, STD) for each in (found, original))
    torch.testing.assert_close(values["mse"], metrics.mse(found, original))
    torch.testing.assert_close(values["psnr"], metrics.psnr(found, original, STD))
    torch.testing.assert_close(values["mse_pixel"], metrics.mse_pixel(x, y))
    torch.testing.assert_close(values["ssim"], metrics.ssim(x, y))
    torch.testing.assert_close(values["rdlv"], (values["ssim"] - 0.1) / 0.1)
    expected = metrics.leakage_score(metrics.to_pixels(iterates, MEAN, STD), y)
    torch.testing.assert_close(values["leakage_score"], expected)
    seen, true = (Means().logits(each) for each in (found, original))
    torch.testing.assert_close(values["kl"], metrics.kl(true, seen), rtol=1e-4, atol=1e-6)  # the original first
    torch.testing.assert_close(values["logit_mse"], metrics.mse(true, seen), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(values["feature_mse"], metrics.mse(true, seen) / 4, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(values["lpips"], (x - y).abs().flatten(1).mean(1).double(), rtol=1e-5, atol=1e-6)
    nearest = identified(found, original, distractors, features=Means().features)
    assert values["identified_features"].tolist() == nearest.tolist()
    assert values["attack_loss"].tolist() == loss.tolist()
    assert not values["diverged"].any()


def test_the_original_itself_is_a_perfect_reconstruction() -> None:
    original = images(3)
    values = score(original, original, MEAN, STD, images(3, 9, seed=1), iterates=original[None])
    assert values["identified"].all()
    assert values["mse"].tolist() == [0] * 3
    assert values["psnr"].tolist() == [metrics.HIGHEST_PSNR] * 3
    torch.testing.assert_close(values["ssim"], torch.ones(3, dtype=torch.float64))
    assert values["leakage_score"].tolist() == [1] * 3


def test_only_what_was_given_is_scored() -> None:
    values = score(images(2), images(2), MEAN, STD)
    assert set(values) == {"mse", "psnr", "mse_pixel", "psnr_pixel", "ssim", "diverged"}


def test_distance_for_identified_is_in_pixels_on_the_display_range() -> None:
    original = metrics.from_pixels(torch.ones(1, 3, 4, 4), MEAN, STD)
    blown_up = original * 1e6
    assert score(blown_up, original, MEAN, STD, images(1, 3)[..., :4, :4])["identified"].all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_reconstruction_counts_as_gray_and_is_flagged(bad: float) -> None:
    original, distractors = images(3), images(3, 4, seed=1)
    found = images(3, seed=2)
    gray = found.clone()
    found[1] = bad
    gray[1] = metrics.from_pixels(torch.full((3, 12, 12), 0.5), MEAN, STD)
    found[2, 0, 0, 0] = bad
    gray[2, 0, 0, 0] = (0.5 - MEAN[0]) / STD[0]
    values, expected = (
        score(each, original, MEAN, STD, distractors, iterates=[each], reference=Means(), lpips=pixel_distance)
        for each in (found, gray)
    )
    assert values.pop("diverged").tolist() == [False, True, True]
    for name, value in values.items():
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value, expected[name])
    torch.testing.assert_close(gray_gaps(found, MEAN, STD), gray)


def test_given_features_take_the_place_of_the_reference() -> None:
    original, distractors = images(3), images(3, 4, seed=1)
    nothing = score(
        original, original, MEAN, STD, distractors, features=lambda x: x[:, :1, 0, 0] * 0, reference=Means()
    )
    assert not nothing["identified_features"].any()  # all alike: nothing can be told apart
    assert score(original, original, MEAN, STD, distractors, reference=Means())["identified_features"].all()


def test_huge_but_finite_pixels_stay_finite() -> None:
    values = score(
        torch.full((1, 3, 12, 12), 3e38), images(1), MEAN, STD, images(1, 2), reference=Means(), lpips=pixel_distance
    )
    assert all(torch.isfinite(value).all() for value in values.values())


def test_a_cost_that_is_not_finite_counts_as_the_largest() -> None:
    x = images(3)
    values = score(x, x, MEAN, STD, attack_loss=torch.tensor([0.5, math.nan, 2.0]))
    assert values["attack_loss"].tolist() == [0.5, 2, 2]
    assert values["diverged"].tolist() == [False, True, False]
    values = score(x, x, MEAN, STD, attack_loss=torch.full((3,), math.inf))
    assert "attack_loss" not in values
    assert values["diverged"].all()
