"""Identification: who is nearest."""

import pytest
import torch

from fedveil.errors import FedveilError
from fedveil.leakage import identified as module
from fedveil.leakage.identified import identified


def test_the_nearest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    originals, distractors = torch.rand(30, 3, 5, 5, generator=random), torch.rand(30, 9, 3, 5, 5, generator=random)
    found = originals + 1.2 * torch.randn(originals.shape, generator=random)
    expected = [
        all((f - o).norm() < (f - d).norm() for d in others)
        for f, o, others in zip(found, originals, distractors, strict=True)
    ]
    assert 0 < sum(expected) < 30
    assert identified(found, originals, distractors).tolist() == expected
    monkeypatch.setattr(module, "CHUNK_VALUES", 2000)  # a few images at a time
    assert identified(found, originals, distractors).tolist() == expected


def test_unrelated_reconstructions_are_identified_by_chance() -> None:
    random = torch.Generator().manual_seed(1)
    images = torch.rand(4000, 6, 1, 3, 3, generator=random)
    share = identified(images[:, 0], images[:, 1], images[:, 2:]).double().mean().item()
    assert share == pytest.approx(1 / 5, abs=0.025)  # four standard errors


def test_ties_and_diverged_reconstructions_are_not_identified() -> None:
    original = torch.zeros(1, 1, 2, 2)
    assert not identified(original, original, original[:, None])  # a copy among the candidates
    gray, white = torch.full_like(original, 0.5), torch.ones(1, 1, 1, 2, 2)
    assert not identified(gray, original, white)  # equally far
    assert identified(original, original, white)
    assert not identified(original * float("nan"), original, white)
    assert not identified(original + float("inf"), original, white)


def test_features_decide_when_given() -> None:
    original = torch.tensor([[[[0.0, 1.0]]]])
    mirrored, other = original.flip(-1), torch.tensor([[[[[0.8, 0.1]]]]])
    assert not identified(mirrored, original, other)
    assert identified(mirrored, original, other, features=lambda images: images.sum((1, 2, 3)))


def test_shapes_are_checked() -> None:
    image = torch.zeros(2, 1, 2, 2)
    with pytest.raises(ValueError, match="distractors"):
        identified(image, image, image)
    with pytest.raises(FedveilError, match="at least one distractor"):
        identified(image, image, image[:, None][:, :0])
    assert identified(image[:0], image[:0], image[:0, None]).shape == (0,)
