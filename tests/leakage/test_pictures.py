"""Pictures: every metric in one call, each role by itself; and what only a comparison with the floors tells."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.errors import FedveilError
from fedveil.leakage import metrics
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.identified import identified
from fedveil.leakage.membership import CHANCE
from fedveil.leakage.modalities import MODALITIES, modality
from fedveil.leakage.modality import LINKED, Scores
from fedveil.leakage.picture_scores import gray_gaps
from fedveil.leakage.pictures import Pictures, pixel_map
from fedveil.leakage.truths import Truths

RGB = fv.Normalization((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
KIND = Pictures(RGB)


def images(*shape: int, seed: int = 0) -> Tensor:
    return RGB.normalize(torch.rand(*shape, 3, 12, 12, generator=torch.Generator().manual_seed(seed)))


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


JUDGES = Pictures(RGB, reference=Means(), lpips=pixel_distance)


def scores(
    found: Tensor,
    original: Tensor,
    *,
    kind: Pictures = KIND,
    size: int = 1,
    iterates: Sequence[Tensor] = (),
    **more: Any,
) -> Scores:
    """Scores of images (N, C, H, W) as batches of `size`."""

    def batches(flat: Tensor) -> Tensor:
        return flat.unflatten(0, (-1, size))

    labels = torch.zeros(len(found) // size, size, dtype=torch.int64)
    true = Truths(batches(original), labels, batches(original), (1,) * len(labels), **more)
    return kind.score(batches(found), true, [batches(each) for each in iterates])


OF_ROWS = {"cells", "number_cells", "category_cells", "whole_rows"}
OF_SENTENCES = {"whole_sentences", "tokens_found", "tokens_placed", "rouge1", "rouge2", "rougeL"}


def values(found: Tensor, original: Tensor, **more: Any) -> dict[str, Tensor]:
    return scores(found, original, **more).values


def test_all_metrics_in_one_call() -> None:
    original, found, distractors = images(4), images(4, seed=1), images(4, 5, seed=2)
    iterates = images(3, 4, seed=3)
    got = values(found, original, kind=JUDGES, distractors=distractors, iterates=list(iterates))
    # The matching cost is the attack's, linking compares updates, membership is of a whole set, the rest needs a floor.
    assert set(got) == set(METRICS) - {"attack_loss", LINKED, "rdlv"} - OF_ROWS - OF_SENTENCES - set(CHANCE)
    assert all(value.shape == (4,) for value in got.values())
    # Shares are booleans, which is how an interval knows them.
    assert {name for name, value in got.items() if value.dtype == torch.bool} == {
        name for name, metric in METRICS.items() if metric.yes_or_no
    } - {LINKED} - OF_ROWS - OF_SENTENCES - set(CHANCE)
    x, y = (RGB.pixels(each) for each in (found, original))
    torch.testing.assert_close(got["mse"], metrics.mse(found, original))
    torch.testing.assert_close(got["psnr"], metrics.psnr(found, original, RGB.std))
    torch.testing.assert_close(got["mse_pixel"], metrics.mse_pixel(x, y))
    torch.testing.assert_close(got["ssim"], metrics.ssim(x, y))
    torch.testing.assert_close(got["leakage_score"], metrics.leakage_score(RGB.pixels(iterates), y))
    seen, true = (Means().logits(each) for each in (found, original))
    torch.testing.assert_close(got["kl"], metrics.kl(true, seen), rtol=1e-4, atol=1e-6)  # the original first
    torch.testing.assert_close(got["logit_mse"], metrics.mse(true, seen), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got["feature_mse"], metrics.mse(true, seen) / 4, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got["lpips"], (x - y).abs().flatten(1).mean(1).double(), rtol=1e-5, atol=1e-6)
    nearest = identified(found, original, distractors, features=Means().features)
    assert got["identified_features"].tolist() == nearest.tolist()
    assert not got["diverged"].any()


def test_the_original_itself_is_a_perfect_reconstruction() -> None:
    original = images(3)
    got = values(original, original, distractors=images(3, 9, seed=1), iterates=[original])
    assert got["identified"].all()
    assert got["mse"].tolist() == [0] * 3
    assert got["psnr"].tolist() == [metrics.HIGHEST_PSNR] * 3
    torch.testing.assert_close(got["ssim"], torch.ones(3, dtype=torch.float64))
    assert got["leakage_score"].tolist() == [1] * 3


def test_only_what_was_given_is_scored() -> None:
    assert set(values(images(2), images(2))) == {"mse", "psnr", "mse_pixel", "psnr_pixel", "ssim", "diverged"}


def test_a_batch_is_put_in_the_order_of_its_originals() -> None:
    original = images(6)
    mixed = original[[2, 0, 1, 4, 5, 3]]
    near = original + 0.01
    got = scores(mixed, original, size=3, iterates=[near[[2, 0, 1, 4, 5, 3]]])
    assert got.values["mse"].tolist() == [0] * 6
    assert torch.equal(got.exhibit, KIND.exhibit(original))
    torch.testing.assert_close(got.values["leakage_score"], values(near, original, iterates=[near])["leakage_score"])


class OneAtATime(Sequence[Tensor]):
    """Iterates in a file, as it were: what was read before must be gone."""

    def __init__(self, listed: list[Tensor]) -> None:
        self._listed, self.read = listed, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, place: Any) -> Any:
        if place >= len(self._listed):
            raise IndexError(place)
        if self.read:
            self.read[-1].fill_(math.nan)
        self.read.append(self._listed[place].clone())
        return self.read[-1]


@pytest.mark.parametrize(("count", "marked"), [(9, (2, 5, 8)), (2, (0, 0, 1)), (1, (0, 0, 0))])
def test_iterates_are_read_one_at_a_time_and_marked_on_the_way(count: int, marked: tuple[int, ...]) -> None:
    original = images(2)
    steps = [original + 0.1 * (count - step) for step in range(count)]
    lazy = OneAtATime([step[:, None] for step in steps])
    true = Truths(original[:, None], torch.zeros(2, 1, dtype=torch.int64), original[:, None], (1, 1))
    got = KIND.score(original[:, None], true, lazy)
    assert len(lazy.read) == count
    assert got.values["leakage_score"].isfinite().all()
    for mark, place in zip(("1/3", "2/3", "all"), marked, strict=True):
        similar = metrics.ssim(KIND.exhibit(steps[place]), KIND.exhibit(original))
        torch.testing.assert_close(got.on_the_way["ssim"][mark], similar)


def test_distance_for_identified_is_in_pixels_on_the_display_range() -> None:
    original = RGB.normalize(torch.ones(1, 3, 4, 4))
    assert values(original * 1e6, original, distractors=images(1, 3)[..., :4, :4])["identified"].all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_reconstruction_counts_as_gray_and_is_flagged(bad: float) -> None:
    original, distractors = images(3), images(3, 4, seed=1)
    found = images(3, seed=2)
    gray = found.clone()
    found[1] = bad
    gray[1] = RGB.normalize(torch.full((3, 12, 12), 0.5))
    found[2, 0, 0, 0] = bad
    gray[2, 0, 0, 0] = (0.5 - RGB.mean[0]) / RGB.std[0]
    got, expected = (
        values(each, original, distractors=distractors, iterates=[each], kind=JUDGES) for each in (found, gray)
    )
    assert got.pop("diverged").tolist() == [False, True, True]
    for name, value in got.items():
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value, expected[name])
    torch.testing.assert_close(gray_gaps(found, RGB), gray)


def test_huge_but_finite_pixels_stay_finite() -> None:
    got = values(torch.full((1, 3, 12, 12), 3e38), images(1), distractors=images(1, 2), kind=JUDGES)
    assert all(torch.isfinite(value).all() for value in got.values())


def own_task(inputs: Tensor) -> fv.Task:
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 2))
    return fv.Task(model=model, data=(inputs, torch.arange(len(inputs)) % 2), clients=2)


# ---- beside the floors -----------------------------------------------------------------------------------------


def similar(*ssim: float) -> dict[str, Tensor]:
    return {"ssim": torch.tensor(ssim, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("noise", "mean", "prior"),
    [((0.1, 0.3), (0.3, 0.5), (0.3, 0.5)), ((0.3, 0.5), (0.1, 0.3), (0.3, 0.5)), ((0.1, 0.9), (0.2, 0.2), (0.1, 0.9))],
    ids=["mean image", "noise", "by their means, not image by image"],
)
def test_leakage_is_relative_to_the_better_floor(
    noise: tuple[float, ...], mean: tuple[float, ...], prior: tuple[float, ...]
) -> None:
    given = {"naive": similar(0.6, 0.4), "noise-floor": similar(*noise), "mean-floor": similar(*mean)}
    got = KIND.relate(given, ("noise-floor", "mean-floor"))
    expected = [(found - guess) / guess for found, guess in zip((0.6, 0.4), prior, strict=True)]
    assert got["naive"]["rdlv"].tolist() == pytest.approx(expected)
    assert "rdlv" in got["noise-floor"]
    assert set(given["naive"]) == {"ssim"}  # as it was: it may be kept


def test_without_a_floor_nothing_is_related() -> None:
    assert "rdlv" not in KIND.relate({"naive": similar(0.5)}, ("noise-floor",))["naive"]


def test_the_floor_is_the_mean_of_all_training_images() -> None:
    task = own_task(torch.rand(50, 1, 4, 4))
    everything, _ = task.train.batch(list(range(len(task.train))))
    assert isinstance(everything, Tensor)
    torch.testing.assert_close(KIND.floor(task.train), everything.mean(0))


# ---- what it takes, and what it says -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.rand(40, 5), "scores images"),
        (torch.rand(40, 8, 8, 3), "channels last"),
        (10 * torch.randn(40, 1, 4, 4), "not pixels"),
    ],
    ids=["flat", "channels last", "wild"],
)
def test_inputs_that_are_no_pictures_are_refused(inputs: Tensor, said: str) -> None:
    with pytest.raises(FedveilError, match=said):
        KIND.check(own_task(inputs), {})


def test_inputs_without_a_normalization_are_taken_as_pixels() -> None:
    plain = own_task(torch.rand(40, 2, 4, 4))
    assert pixel_map(plain) == fv.Normalization((0.0, 0.0), (1.0, 1.0))
    KIND.check(plain, {"lpips": "none"})


def test_recognizable_is_the_right_one_and_similar_enough() -> None:
    got = KIND.recognizable({"ssim": [0.9, 0.9, 0.4], "identified": [1.0, 0.0, 1.0]}, 0.5)
    assert got is not None
    assert got.tolist() == [True, False, False]
    assert KIND.recognizable({"ssim": [0.9]}, 0.5) is None
    assert "at least 0.7" in KIND.recognizable_note(0.7)


def test_modalities_are_known_by_name() -> None:
    assert modality("pictures") is MODALITIES["pictures"]
    with pytest.raises(FedveilError, match="did you mean 'pictures'"):
        modality("picture")
    for kind in MODALITIES.values():
        assert {*kind.headline, *kind.shown, kind.nearness, *kind.caption} <= METRICS.keys()
        assert all(METRICS[name].share for name in kind.headline)
    with pytest.raises(ValueError, match="see `equipped`"):
        modality("pictures").exhibit(images(1))


def test_what_scores_depend_on_is_told() -> None:
    assert KIND.described() == Pictures(fv.Normalization(RGB.mean, RGB.std)).described()
    assert KIND.described() != Pictures(fv.Normalization(RGB.mean, (0.2, 0.2, 0.2))).described()


# ---- nobody else names its metrics -------------------------------------------------------------------------------

OWN = re.compile(r"\b(identified|psnr|ssim|lpips|rdlv)(_\w+)?\b", re.IGNORECASE)
PACKAGE = Path(fv.__file__).parent
# A setting for the user's choice of this judge, with its option; and the reader of a format that had these names.
ALLOWED = {
    "auditing/earlier.py": {"identified_among", "ssim_at", "ssim", "recognizable_ssim"},
    "auditing/settings.py": {"lpips"},
    "cli/options.py": {"lpips"},
    "cli/tune.py": {"identified"},  # the limit that a user names
    "study/definition.py": {"lpips", "psnr"},  # what the papers print, and whose weights it needs
}


def test_nothing_outside_of_leakage_names_a_metric_of_pictures() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".html", ".css", ".pyi")]
    assert len(files) > 100
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("leakage/"):
            continue
        found = {match.group() for match in OWN.finditer(path.read_text(encoding="utf-8"))}
        assert {each.lower() for each in found} <= ALLOWED.get(name, set()), name
