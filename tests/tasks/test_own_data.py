"""Own data in the forms that people have them: hospitals with their rows or sets, torchvision's habits."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

import fedveil as fv
from fedveil.errors import FedveilError
from fedveil.tasks.examples import Examples
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.task import Task, client_labels

ROWS = torch.arange(1200, dtype=torch.float64)[:, None]  # every row is a number, so that each can be found again
LABELS = torch.arange(1200) % 3
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def wide() -> nn.Module:
    return nn.Linear(1, 3, dtype=torch.float64)


def net(channels: int = 3, classes: int = 3, side: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(2 * (side - 2) ** 2, classes))


def rows(part: Examples | None, indices: Tensor | None = None) -> set[int]:
    assert part is not None
    inputs, targets = part.batch(torch.arange(len(part)) if indices is None else indices)
    assert isinstance(inputs, Tensor)
    found = inputs.flatten().long()
    assert (found % 3).equal(targets)
    return set(found.tolist())


class Pictures(Dataset[Any]):
    """As torchvision's ImageFolder with ToTensor and Normalize."""

    def __init__(self, count: int = 60, classes: tuple[str, ...] = ("cat", "dog", "eel"), seed: int = 0) -> None:
        self.classes = list(classes)
        self.pixels = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return IMAGENET.normalize(self.pixels[index]), index % 3


# ---- whose rows ----------------------------------------------------------------------------------------------


def test_clients_keep_their_rows_and_some_of_each_are_held_out() -> None:
    hospitals = [range(600), torch.arange(600, 1200)]
    made = Task(wide(), (ROWS, LABELS), clients=hospitals, split="70/10/20")
    own = [rows(made.train, indices) for indices in made.clients]
    assert own[0] < set(range(600))
    assert own[1] < set(range(600, 1200))
    assert [len(each) for each in own] == [420, 420]
    validation, test = rows(made.validation), rows(made.test)
    assert (len(validation), len(test)) == (120, 240)
    assert own[0] | own[1] | validation | test == set(range(1200))
    assert len({row for row in test if row < 600}) == 120
    again = Task(wide(), (ROWS, LABELS), clients=hospitals, split="70/10/20")
    other = Task(wide(), (ROWS, LABELS), clients=hospitals, split="70/10/20", seed=1)
    assert rows(again.test) == test != rows(other.test)


def test_rows_of_no_client_are_held_out_and_clients_keep_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = Task(wide(), (ROWS, LABELS), clients=[range(500), [*range(600, 1100)]])
    assert [rows(made.train, indices) for indices in made.clients] == [set(range(500)), set(range(600, 1100))]
    assert rows(made.validation) | rows(made.test) == {*range(500, 600), *range(1100, 1200)}
    assert len(made.test) == 100
    assert "200 rows belong to no client" in caplog.text
    assert len(Task(wide(), (ROWS, LABELS), clients=[range(1000)], split="80/20").test) == 200


def test_with_parts_indices_are_rows_of_the_training_part() -> None:
    made = Task(wide(), ((ROWS, LABELS), (ROWS[:9], LABELS[:9])), clients=[range(5, 9), [2]])
    assert [rows(made.train, indices) for indices in made.clients] == [{5, 6, 7, 8}, {2}]
    assert made.validation is None


@pytest.mark.parametrize(
    "clients, line",
    [
        ([range(600), range(599, 1200)], "row 599 belongs to client 0 and to client 1: give every row to one"),
        ([[1, 1, 2], range(5, 1200)], "client 0 has a row twice"),
        ([range(600), range(600, 1201)], "client 1 must have indices of the data, 0 to 1199"),
        ([range(600), []], "client 1 must have the indices of its examples, such as range"),
        ([range(600), [0.5]], "client 1 must have the indices of its examples"),
        ([[0, 1], range(2, 1200)], "client 0: 2 examples cannot be divided into 3 parts.*test data apart"),
        ([range(600), (ROWS, LABELS)], "client 1 must have the indices"),
        ("two", "clients must be a number, indices, or data sets, not str"),
        (2.5, "clients must be a number, indices, or data sets, not float"),
    ],
)
def test_wrong_indices_get_one_line(clients: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        Task(wide(), (ROWS, LABELS), clients=clients)


def test_every_hospital_may_have_a_set_of_its_own() -> None:
    first, second = (ROWS[:100], LABELS[:100]), TensorDataset(ROWS[100:300], LABELS[100:300])
    made = Task(wide(), clients=[first, second])
    assert [len(indices) for indices in made.clients] == [70, 140]
    assert rows(made.train, made.clients[0]) < set(range(100))
    assert rows(made.train, made.clients[1]) < set(range(100, 300))
    assert rows(made.train) | rows(made.validation) | rows(made.test) == set(range(300))
    mixed = made.clients[1][3], made.clients[0][5], made.clients[1][1]
    inputs, _ = made.train.batch(torch.stack(mixed))
    assert [int(value) for value in inputs] == [rows(made.train, index[None]).pop() for index in mixed]
    apart = Task(wide(), clients=[(first, first), (second, first)])
    assert ([len(indices) for indices in apart.clients], len(apart.test), apart.validation) == ([100, 200], 200, None)
    assert made.data_hash != Task(wide(), clients=[second, first]).data_hash


@pytest.mark.parametrize(
    "clients, data, line",
    [
        ([Pictures(), Pictures()], Pictures(), "each client has a data set of its own: leave data out"),
        ([Pictures(), Pictures(classes=("cat", "eel", "dog"))], None, "client 0 data are cat, dog, eel, .*client 1"),
        ([(ROWS, LABELS), Pictures()], None, r"client 1 has inputs of shape \(3, 8, 8\), client 0 has .* \(1,\)"),
        ([(ROWS, LABELS), ((ROWS, LABELS),) * 2], None, "some clients have validation data and others have none"),
        ([(ROWS, LABELS), (ROWS[:0], LABELS[:0])], None, "client 1 data is empty"),
    ],
)
def test_wrong_sets_of_clients_get_one_line(clients: Any, data: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        Task(wide(), data, clients=clients)


def test_a_limit_keeps_rows_with_their_clients() -> None:
    made = Task(wide(), (ROWS, LABELS), clients=[range(300), range(300, 1200)], limit=84)
    assert [len(indices) for indices in made.clients] == [21, 63]
    assert rows(made.train, made.clients[0]) < set(range(300))
    assert rows(made.train, made.clients[1]) < set(range(300, 1200))


# ---- normalized by transforms --------------------------------------------------------------------------------


def test_a_normalized_data_set_can_be_audited() -> None:
    data = Pictures(160)
    made = Task(net(), data, clients=2, normalization=IMAGENET, normalized=True)
    inputs, _ = made.train.batch([0])
    assert any(torch.equal(inputs[0], data[index][0]) for index in range(160))  # type: ignore[arg-type]
    outcome = fv.audit(
        made,
        None,
        fv.attacks.InvertingGradients(steps=2),
        settings=fv.AuditSettings(victims=2, reference="none"),
        train=False,
    )
    shown = torch.from_numpy(outcome.images.originals)
    assert any(torch.allclose(shown[0], data.pixels[index], atol=1e-5) for index in range(160))
    assert outcome.result.holdings is not None
    assert outcome.result.holdings.labels == ["cat", "dog", "eel"]


def test_an_audit_without_a_normalization_says_what_to_write() -> None:
    made = Task(net(), Pictures(160), clients=2)
    with pytest.raises(FedveilError, match=r"range from -2\.\d+ to 2\.\d+ .*normalization=.*, normalized=True"):
        fv.audit(made, None, "inverting-gradients:steps=1", train=False)


PIXELS = torch.rand(30, 3, 4, 4, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(30) % 3


@pytest.mark.parametrize(
    "inputs, normalized, line",
    [
        (IMAGENET.normalize(PIXELS), False, "if this normalization was applied already, add normalized=True"),
        (PIXELS * 255, False, "range from .* to 25.*: divide by 255, or, if they are normalized already, give"),
        (IMAGENET.normalize(IMAGENET.normalize(PIXELS)), True, r"stand for pixels from -2\.\d+ to .*: give the mean"),
        (PIXELS, True, "as pixels do that are not normalized yet: leave normalized=True out"),
        ((255 * PIXELS).byte(), True, "uint8 images are pixels, .*: leave normalized=True out"),
    ],
)
@pytest.mark.parametrize("form", [tuple, lambda pair: TensorDataset(*pair)], ids=["arrays", "dataset"])
def test_nothing_is_normalized_twice_or_not_at_all_in_silence(
    inputs: Tensor, normalized: bool, line: str, form: Any
) -> None:
    with pytest.raises(FedveilError, match=line):
        Task(net(side=4), form((inputs, CLASSES)), normalization=IMAGENET, normalized=normalized)


@pytest.mark.parametrize("form", [tuple, lambda pair: TensorDataset(*pair)], ids=["arrays", "dataset"])
def test_pixels_and_bytes_are_normalized_here(form: Any) -> None:
    expected = IMAGENET.normalize(PIXELS)
    for inputs, close in ((PIXELS, 1e-6), ((PIXELS * 255).round().byte(), 0.02)):
        made = Task(net(side=4), (form((inputs, CLASSES)),) * 2, normalization=IMAGENET)
        found = made.train.batch(range(30))[0]
        assert torch.allclose(found, expected, atol=close)  # type: ignore[arg-type]
    done = Task(net(side=4), (form((expected.half(), CLASSES)),) * 2, normalization=IMAGENET, normalized=True)
    assert torch.allclose(done.train.batch(range(30))[0], expected, atol=0.01)  # type: ignore[arg-type]
    with pytest.raises(FedveilError, match="normalized=True needs the normalization"):
        Task(net(side=4), form((expected, CLASSES)), normalized=True)


# ---- names ---------------------------------------------------------------------------------------------------


def test_classes_have_names() -> None:
    data = (PIXELS, CLASSES)
    assert Task(net(side=4), data).label_names == ("0", "1", "2")
    named = Task(net(side=4), data, class_names=["cat", "dog", "\x1b[31meel\n"])
    assert named.label_names == ("cat", "dog", "\\x1b[31meel")
    assert client_labels(named).labels == list(named.label_names)
    pictures = Pictures()
    for form in (pictures, random_split(pictures, [40, 20]), Subset(Subset(pictures, range(50)), range(40))):
        assert Task(net(), form, clients=2).label_names == ("cat", "dog", "eel"), form
    assert Task(net(classes=4), pictures, clients=2).label_names == ("cat", "dog", "eel", "3")
    assert Task(net(), pictures, clients=2, class_names=("a", "b", "c")).label_names == ("a", "b", "c")


@pytest.mark.parametrize(
    "names, line",
    [
        (("cat", "dog"), "2 class_names for 3 outputs of the model: give one name for each"),
        ("cat", "class_names must be the names of the classes, such as"),
        ((1, 2, 3), "class_names must be the names of the classes"),
    ],
)
def test_wrong_names_get_one_line(names: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        Task(net(side=4), (PIXELS, CLASSES), class_names=names)


def test_train_and_test_sets_must_number_their_classes_alike() -> None:
    with pytest.raises(FedveilError, match="training data are cat, dog, eel, those of the test data are cat, eel"):
        Task(net(), (Pictures(), Pictures(classes=("cat", "eel"))))


# ---- floating types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "data, settings",
    [
        ((PIXELS.numpy().astype(np.float64), CLASSES), {"normalization": IMAGENET}),
        ((PIXELS.half(), CLASSES), {}),
        (((255 * PIXELS).byte(), CLASSES), {"normalization": IMAGENET}),
        (TensorDataset(PIXELS, CLASSES), {}),
        ((PIXELS, (torch.rand(30, 3) < 0.5).float()), {}),
        (None, {"clients": [(PIXELS, CLASSES), TensorDataset(PIXELS.double(), CLASSES)]}),
    ],
    ids=["float64", "half", "bytes", "dataset", "several", "clients"],
)
def test_a_model_gets_its_own_floating_type(dtype: torch.dtype, data: Any, settings: dict[str, Any]) -> None:
    made = Task(net(side=4).to(dtype), data, **settings)
    for part in (made.train, made.validation, made.test):
        assert part is not None
        inputs, targets = part.batch([0])
        assert isinstance(inputs, Tensor)
        assert inputs.dtype == dtype
        assert torch.isfinite(made.loss(made.model(inputs), targets))
        assert part.subset([0]).batch([0])[0].dtype == dtype  # type: ignore[union-attr]


def test_double_precision_is_kept() -> None:
    exact = torch.rand(30, 1, dtype=torch.float64)
    made = Task(wide(), ((exact, CLASSES), (exact, CLASSES)))
    assert made.train.batch(range(30))[0].equal(exact)  # type: ignore[union-attr]


# ---- the first hour with torchvision's habits ----------------------------------------------------------------


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def gray(value: int, mode: str = "L") -> Image.Image:
    return Image.new(mode, (8, 6), value)


def test_pictures_labels_and_lists_as_people_have_them() -> None:
    pictures = Items([(gray(index * 8), index % 3) for index in range(30)])
    made = Task(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), pictures)
    assert made.shape == (1, 6, 8)
    assert made.train.batch([0])[0].max() <= 1  # type: ignore[union-attr]
    color = Items([(gray(index, "RGB"), np.array([index % 3])) for index in range(30)])
    assert Task(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), color).shape == (3, 6, 8)
    column = Task(net(side=4), (PIXELS.numpy().astype(np.float64), CLASSES.numpy()[:, None]))
    assert column.classes == 3
    assert Task(net(side=4), (PIXELS, CLASSES.tolist())).classes == 3  # torchvision's `targets`
    findings = Items([(PIXELS[index], np.array([1, index % 2, 0], np.uint8)) for index in range(30)])
    several = Task(net(side=4), findings)
    assert several.loss is functional.binary_cross_entropy_with_logits
    assert several.labels == 3


ONE_HOT = functional.one_hot(CLASSES, 3)
LAST = PIXELS.permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    "data, line",
    [
        ((PIXELS, ONE_HOT), r"one-hot classes do: give class numbers, targets.argmax\(1\)"),
        ((PIXELS, ONE_HOT.double().numpy()), r"one-hot classes do: give class numbers, targets.argmax\(1\)"),
        (TensorDataset(PIXELS, ONE_HOT), r"one-hot classes do: give class numbers, targets.argmax\(1\)"),
        ((LAST, CLASSES), r"batch of shape \(2, 4, 4, 3\) \(if these are height, .*permute\(0, 3, 1, 2\)"),
        (DataLoader(TensorDataset(PIXELS, CLASSES)), "give its data set, loader.dataset"),
        (((PIXELS, PIXELS), CLASSES), "inputs of several parts need names: give a dict of arrays"),
        (Items([(gray(1, "RGBA"), 0)] * 9), r"mode RGBA: use picture.convert\('RGB'\)"),
        (Items([((PIXELS[0], PIXELS[0]), 0)] * 9), "has 2 parts without names"),
        (Items([(PIXELS[0], {"label": 1})] * 9), "one whole class number, not dict"),
        ((PIXELS, {"label": CLASSES}), "must be a tensor or a numpy array, not dict"),
        ((PIXELS, CLASSES.float()), "if the targets are classes, give whole numbers"),
    ],
)
def test_what_cannot_be_meant_says_what_to_write(data: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line) as caught:
        Task(net(side=4), data)
    assert "\n" not in str(caught.value)


def test_one_hot_rows_may_be_several_labels_if_the_loss_says_so() -> None:
    made = Task(net(side=4), (PIXELS, ONE_HOT.float()), loss=functional.binary_cross_entropy_with_logits)
    assert made.labels == 3


def test_channels_last_are_said_where_a_normalization_is_given_and_where_an_audit_starts() -> None:
    with pytest.raises(
        FedveilError, match=r"expected \(..., 3, height, width\), so write images.permute\(0, 3, 1, 2\)"
    ):
        Task(net(side=4), (LAST, CLASSES), normalization=IMAGENET)
    flat = Task(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), (LAST, CLASSES))
    with pytest.raises(FedveilError, match="with the channels last: write images"):
        fv.audit(flat, None, "inverting-gradients:steps=1", train=False)


def test_sets_put_together_by_torch_work() -> None:
    assert len(Task(net(), ConcatDataset([Pictures(), Pictures(seed=1)]), clients=2).train) == 84
