"""The reference classifier: what it learns, that it is the same every time, and its cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedveil.errors import FedveilError
from fedveil.leakage import reference as module
from fedveil.leakage.pictures import Pictures
from fedveil.leakage.reference import Reference, reference
from fedveil.leakage.truths import Truths
from fedveil.tasks.task import Task, task


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    return tmp_path / "reference"


def own(count: int = 60, shape: tuple[int, ...] = (1, 8, 8), classes: int = 2, seed: int = 0) -> Task:
    """Bright and dark pictures."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    images = 0.2 * torch.rand(count, *shape, generator=random) + 0.7 * labels.view(-1, *[1] * len(shape)) / classes
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
    model(images)
    return Task(model, (images, labels), clients=2)


def same(one: Reference, other: Reference) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_learns_digits_and_tells_how_well() -> None:
    digits = task("digits", model="mlp:hidden=[8]")
    found = reference(digits)
    assert found.examples == len(digits.train)
    assert found.accuracy > 0.85
    images, labels = digits.test.batch(range(len(digits.test)))
    assert isinstance(images, torch.Tensor)
    logits, features = found.logits(images), found.features(images)
    assert (logits.shape, features.shape) == ((len(labels), 10), (len(labels), 64))
    assert found.accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    torch.testing.assert_close(found.model.head(features), logits)
    assert not logits.requires_grad

    kind = Pictures(digits.normalization, reference=found)
    original, other = images[:8], images[8:16]

    def score(inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        distractors = images[8:16].expand(8, -1, -1, -1, -1)
        true = Truths(original[:, None], labels[:8, None], original[:, None], (1,) * 8, distractors=distractors)
        return kind.score(inputs[:, None], true).values

    values = score(original)
    assert all(values[name].abs().max() < 1e-9 for name in ("kl", "feature_mse", "logit_mse"))
    assert values["identified_features"].all()
    far, near = score(other), score(original + 0.05 * (other - original))
    for name in ("kl", "feature_mse", "logit_mse"):
        assert far[name].mean() > 10 * near[name].mean() > 0


def test_what_it_is_is_part_of_what_scores_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 1)
    bright = own()
    one, same, other = reference(bright), reference(bright), reference(bright, seed=1)
    assert Pictures(reference=one).described() == Pictures(reference=same).described()
    assert Pictures(reference=one).described() != Pictures(reference=other).described() != Pictures().described()


def test_is_the_same_every_time_and_leaves_the_generator_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 20)
    bright = own()
    state = torch.get_rng_state()
    first = reference(bright)
    assert torch.equal(state, torch.get_rng_state())
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "elsewhere"))
    assert same(first, reference(own()))
    assert not same(first, reference(own(), seed=1))
    assert not same(first, reference(own(seed=1)))


def test_is_trained_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 20)
    first = reference(own())
    (file,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_train", lambda *_: pytest.fail("trained again"))
        again = reference(own())
    assert same(first, again)
    assert (again.accuracy, again.examples) == (first.accuracy, first.examples)
    file.write_bytes(file.read_bytes()[:100])  # a damaged file is made anew
    assert same(first, reference(own()))
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path / "file"))
    assert reference(own()).examples == len(own().train)


def test_uses_no_more_examples_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "EXAMPLES", 10)
    assert reference(own()).examples == 10


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 33, 50), (1, 1, 1), (2, 5, 7)])
def test_takes_pictures_of_any_size(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    found = reference(own(20, shape, classes=3))
    assert found.logits(torch.rand(5, *shape)).shape == (5, 3)
    assert found.features(torch.rand(600, *shape).double()).shape == (600, 64)


def test_needs_images_with_classes() -> None:
    with pytest.raises(FedveilError, match="needs images"):
        reference(own(shape=(12,)))
