"""Auxiliary data: declared, disjoint from what the task holds, bounded, refused in one line where it does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedveil as fv
from fedveil.auditing.auxiliary import Auxiliary, AuxiliarySource
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.errors import FedveilError
from fedveil.tasks.examples import ArrayExamples, Examples
from fedveil.tasks.normalization import Normalization

from .learning import Nearest

GRAY = Normalization((0.25,), (0.5,))
SETTINGS = AuditSettings(victims=3, candidates=10, reference="none")


def pictures(count: int, first: int = 0) -> Tensor:
    """Pictures of eight bits, all different."""
    numbers = torch.arange(first, first + count)
    values = torch.stack([numbers % 256, numbers // 256, *[numbers * 7 % 256] * 14], 1)
    return values.to(torch.uint8).reshape(count, 1, 4, 4)


def own_task(train: int = 60, **more: Any) -> fv.Task:
    """Training pictures 0, 1, 2, … and test pictures 1000, 1001, …"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 4))
    data = tuple((pictures(n, first), torch.arange(n) % 4) for n, first in ((train, 0), (50, 1000)))
    return fv.Task(model=model, data=data, clients=2, normalization=GRAY, **more)


def numbers(examples: Examples, normalization: Normalization | None = GRAY) -> list[int]:
    """Which pictures these are."""
    inputs, _ = examples.batch(range(len(examples)))
    assert isinstance(inputs, Tensor)
    pixels = inputs if normalization is None else normalization.pixels(inputs)
    low, high = ((pixels.flatten(1)[:, place] * 255).round().long() for place in (0, 1))
    return (low + 256 * high).tolist()


def chosen(own: Any, task: fv.Task, **settings: Any) -> Auxiliary | None:
    source = AuxiliarySource(AuditSettings(**settings), own)
    return source.chosen(source.read(task), None, task, [task.train, task.test])


# ---- where they come from ------------------------------------------------------------------------------------


def test_held_out_examples_are_shared_with_the_judges() -> None:
    found = fv.audit(own_task(), "clip", Nearest(), settings=SETTINGS, train=False, backend="stacked")
    told = found.result.auxiliary
    assert told is not None
    assert (told.source, told.part, told.used, told.dropped) == ("own data", "held-out test images", 25, 0)
    row = found.result.row("adaptive", "test-nearest")
    assert row is not None
    assert row.threat is not None
    assert row.threat.words == "auxiliary data (25 held-out test images), knows the defense"
    (said,) = [each for each in found.result.assumptions if each.switch == "auxiliary data"]
    assert said.words.startswith("test-nearest learned from 25 held-out test images of own data, with their labels")
    assert any("but test-nearest had 25 held-out" in line for line in found.result.not_given)


@pytest.mark.parametrize("form", ["bytes", "pixels", "normalized", "numpy", "dataset", "examples"])
def test_what_the_task_holds_is_dropped_whatever_form_it_comes_in(form: str) -> None:
    images, labels = pictures(80), torch.arange(80) % 4  # the task trains on the first 60
    images[70:75] = pictures(5, 1000)  # and tests on these
    floats = images / 255
    own: Any = {
        "bytes": (images, labels),
        "pixels": (floats.double(), labels),
        "normalized": (GRAY.normalize(floats), labels),
        "numpy": (images.numpy(), labels.numpy()),
        "dataset": TensorDataset(floats, labels),
        "examples": ArrayExamples(images, labels, GRAY),
    }[form]
    found = chosen(own, own_task())
    assert found is not None
    assert numbers(found.examples) == [*range(60, 70), *range(75, 80)]
    assert (found.dropped, found.words) == (65, "15 images of your own")
    assert found.told == "Left out: 65 that the task holds too."
    inputs, _ = found.examples.batch([0])
    assert isinstance(inputs, Tensor)
    assert torch.allclose(inputs[0], GRAY.normalize(pictures(1, 60)[0] / 255), atol=1e-5)  # as the model takes them


def test_so_many_at_most_evenly_spread() -> None:
    found = chosen((pictures(100, 100), torch.arange(100) // 25), own_task(), auxiliary_most=10)
    assert found is not None
    assert numbers(found.examples) == list(range(100, 200, 10))
    assert (found.left, found.told) == (90, "Left out: 90 beyond the most that are used (auxiliary_most).")


def test_a_named_set_gives_its_training_part_less_what_the_task_holds() -> None:
    small = fv.task("digits", model="mlp:hidden=[8]", clients=2, limit=200)
    found = chosen(None, small, auxiliary="digits")
    assert found is not None
    assert (found.source, found.part) == ("digits", "training images")
    whole = fv.task("digits", model="mlp:hidden=[8]", split="own:validation=0")

    def marks(examples: Examples) -> set[bytes]:
        inputs, _ = examples.batch(range(len(examples)))
        assert isinstance(inputs, Tensor)
        return {row.numpy().tobytes() for row in inputs.flatten(1)}

    held = marks(small.train) | marks(small.test)
    assert marks(found.examples) == marks(whole.train) - held
    assert found.dropped == len(whole.train) - len(found.examples) >= 200
    with pytest.raises(FedveilError, match=r"the task holds all of the [\d,]+ training images of digits itself"):
        chosen(None, whole, auxiliary="digits")


def test_a_python_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n"
        "from fedveil import Normalization\n"
        "images = (np.arange(1, 41)[:, None, None, None] * np.ones((40, 1, 4, 4))).astype(np.uint8)\n"
        "more = dict(data=((images, np.arange(40) % 4), (images, np.arange(40) % 4)),\n"
        "            normalization=Normalization((0.25,), (0.5,)))\n"
        "other = dict(more, normalization=Normalization((0.5,), (0.5,)))\n",
        encoding="utf-8",
    )
    found = chosen(None, own_task(), auxiliary=f"{path}:more")
    assert found is not None
    assert (len(found.examples), found.source) == (40, "mine.py:more")
    with pytest.raises(FedveilError, match=r"is normalized by .*, the task by"):
        chosen(None, own_task(), auxiliary=f"{path}:other")


# ---- what does not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ((pictures(9).repeat(1, 3, 1, 1), torch.zeros(9).long()), "3, 4, 4"),
        ((pictures(9), torch.full((9,), 4)), r"labels of your own must be between 0 and 3, .*got 4 to 4"),
        ((pictures(9), torch.zeros(8).long()), "9 inputs but 8 labels"),
        ((pictures(9), torch.zeros(9, 2)), "one class per image"),
        ((pictures(9) * 3.0, torch.zeros(9).long()), "range from 0 to"),
        ((pictures(0), torch.zeros(0).long()), "no examples"),
        ((pictures(9),), r"give \(images, labels\), not 1 things"),
        (3, "int has no length"),
    ],
    ids=["shape", "labels", "counts", "several", "pixels", "empty", "one", "number"],
)
def test_what_does_not_fit_is_refused_in_one_line_before_training(own: Any, said: str) -> None:
    with pytest.raises(FedveilError, match=rf"^auxiliary data: .*{said}") as raised:
        fv.audit(own_task(), "clip", Nearest(), auxiliary=own, settings=SETTINGS)
    assert "\n" not in str(raised.value)


def test_a_set_of_another_shape_or_with_other_classes_is_refused() -> None:
    with pytest.raises(FedveilError, match=r"digits has images of shape \(1, 8, 8\), the task of \(1, 4, 4\)"):
        fv.audit(own_task(), "clip", Nearest(), auxiliary="digits", settings=SETTINGS)
    generator = np.random.default_rng(0)
    few = fv.Task(
        model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        data=(generator.random((60, 1, 8, 8), np.float32), np.arange(60) % 3),
    )
    with pytest.raises(FedveilError, match="digits has 10 classes, the task has 3"):
        fv.audit(few, "clip", Nearest(), auxiliary="digits", settings=SETTINGS)


def test_an_attack_that_learns_needs_something_to_learn_from() -> None:
    with pytest.raises(FedveilError, match="test-nearest learns from auxiliary data, and there are none"):
        fv.audit(own_task(), "clip", Nearest(), auxiliary="none", settings=SETTINGS)


# ---- what is kept --------------------------------------------------------------------------------------------


def test_other_auxiliary_data_are_learned_from_anew_and_the_same_are_not(tmp_path: Path) -> None:
    store, task = Store(tmp_path), own_task()

    def learned(first: int, **more: Any) -> int:
        store.made.clear()
        settings = dataclasses.replace(SETTINGS, **more)
        own = (pictures(30, first), torch.arange(30) % 4)
        fv.audit(task, "clip", Nearest(), auxiliary=own, settings=settings, train=False, backend="stacked", store=store)
        return sum(stage == "fit" for stage, _ in store.made)

    assert learned(100) == 2
    assert learned(100) == 0
    assert learned(200) == 2
    assert learned(100, auxiliary_most=20) == 2


def test_a_result_says_that_no_file_repeats_it_with_data_of_ones_own() -> None:
    from fedveil.auditing.again import config_file

    task = fv.task("digits", model="mlp:hidden=[8]", clients=2, limit=60)
    images, labels = fv.task("digits").train.batch(range(300))
    found = fv.audit(task, "clip", Nearest(), auxiliary=(images, labels), settings=SETTINGS, train=False)
    assert found.result.auxiliary is not None
    assert found.result.auxiliary.dropped > 0
    assert config_file(found.result.provenance.config) is None
    named = fv.audit(task, "clip", Nearest(), auxiliary="digits", settings=SETTINGS, train=False)
    assert named.result.provenance.config["audit"]["auxiliary"] == "digits"
    assert named.result.auxiliary is not None
    assert named.result.auxiliary.part == "training images"
