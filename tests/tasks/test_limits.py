from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fedveil.errors import FedveilError
from fedveil.tasks.examples import ArrayExamples
from fedveil.tasks.limits import LEAST_HELD_OUT, limited
from fedveil.tasks.splits import Parts
from fedveil.tasks.task import client_labels_of

# Sorted by class, as folders are: 60 %, 30 % and 10 %.
SHARES = (0.6, 0.3, 0.1)


def sorted_examples(size: int) -> ArrayExamples:
    labels = torch.cat([torch.full((round(share * size),), number) for number, share in enumerate(SHARES)])
    return ArrayExamples(torch.arange(size, dtype=torch.float64)[:, None], labels)


def rows(part: object) -> list[int]:
    inputs, _ = part.batch(range(len(part)))  # type: ignore[attr-defined, arg-type]
    return [int(value) for value in inputs.flatten()]


def test_every_class_keeps_its_share_in_every_part() -> None:
    whole = Parts(sorted_examples(1000), sorted_examples(400), sorted_examples(2000))
    small, _ = limited(whole, None, 200, seed=0)
    assert small.train.labels.bincount().tolist() == [120, 60, 20]
    assert small.test.labels.bincount().tolist() == [240, 120, 40]
    assert small.validation is not None
    assert len(small.validation) == LEAST_HELD_OUT  # a fifth would be 80


def test_the_choice_is_random_and_the_seeds() -> None:
    whole = Parts(sorted_examples(1000), None, sorted_examples(100))
    first, again, other = (rows(limited(whole, None, 100, seed)[0].train) for seed in (0, 0, 1))
    assert first == again == sorted(set(first))
    assert first != other
    assert first[:60] != list(range(60))
    assert max(first) > 950


def test_a_limit_below_the_number_of_classes_is_no_error() -> None:
    whole = Parts(sorted_examples(100), None, sorted_examples(100))
    assert len(limited(whole, None, 1, seed=0)[0].train) == 1
    assert limited(whole, None, 100, seed=0)[0] is whole


def test_examples_with_several_labels_are_drawn_at_random() -> None:
    several = ArrayExamples(torch.arange(100.0)[:, None], (torch.rand(100, 3) < 0.5).float())
    drawn = rows(limited(Parts(several, None, several), None, 10, seed=0)[0].train)
    assert len(set(drawn)) == 10
    assert max(drawn) > 20


def test_every_client_keeps_its_share_of_its_own() -> None:
    whole = Parts(sorted_examples(1000), None, sorted_examples(100))
    clients = (torch.arange(0, 1000, 2), torch.arange(1, 400, 2))  # some rows are nobody's
    small, members = limited(whole, clients, 70, seed=0)
    assert members is not None
    assert [len(indices) for indices in members] == [50, 20]
    found = rows(small.train)
    assert all(found[index] % 2 == number for number, indices in enumerate(members) for index in indices.tolist())
    with pytest.raises(FedveilError, match="limit 2 leaves client 1 without an example: it has 1"):
        limited(whole, (torch.arange(999), torch.tensor([999])), 2, seed=0)


def test_limits_below_one_are_refused() -> None:
    whole = Parts(sorted_examples(100), None, sorted_examples(100))
    with pytest.raises(FedveilError, match="limit must be at least 1, got 0"):
        limited(whole, None, 0, seed=0)


def test_a_folder_of_pictures_is_not_cut_to_its_first_class(tmp_path: Path) -> None:
    for number, name in enumerate(("basophil", "eosinophil", "monocyte")):
        (tmp_path / name).mkdir()
        for index in range(20):
            Image.new("L", (8, 8), 10 * number + index).save(tmp_path / name / f"{index}.png")
    held = client_labels_of(f"image-folder:path={tmp_path},size=8,channels=1", clients=1, limit=12)
    assert held.labels == ["basophil", "eosinophil", "monocyte"]
    assert held.sizes == [12]
    assert min(held.counts[0]) >= 3
