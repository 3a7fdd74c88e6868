from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedveil.errors import FedveilError
from fedveil.registry import models
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.partition import IID
from fedveil.tasks.task import Task, client_labels, client_labels_of, task

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


def linear(outputs: int = 3) -> nn.Module:
    return nn.Linear(5, outputs)


# ---- by name -----------------------------------------------------------------------------------------


def test_by_name() -> None:
    made = task("digits", clients=5)
    assert (made.name, made.model_name, made.classes, made.shape) == ("digits", "lenet", 10, (1, 8, 8))
    assert (len(made.train), len(made.test), len(made.clients)) == (1293, 360, 5)
    assert made.validation is not None
    assert len(made.validation) == 144
    assert made.normalization is not None
    assert (made.buffers, made.perturb) == ("shared", None)
    assert sorted(torch.cat(made.clients).tolist()) == list(range(1293))
    inputs, targets = made.train.batch(made.clients[0][:8])
    assert made.loss(made.model(inputs), targets).dim() == 0
    pixels = made.normalization.pixels(inputs)  # type: ignore[arg-type]
    assert pixels.min() > -1e-6
    assert pixels.max() < 1 + 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": "mlp:hidden=[16,8],activation=tanh", "clients": 3, "seed": 7, "limit": 100},
        {"model": "resnet18:width=4,norm=group", "split": (0.8, 0.1, 0.1), "buffers": "local"},
        {"split": "own:validation=0", "partition": IID()},
    ],
)
def test_the_description_rebuilds_the_task(settings: dict[str, Any]) -> None:
    made = task("digits", **settings)
    plain = json.loads(json.dumps(made.description))
    again = task(**plain)
    assert again.description == made.description
    assert (again.model_hash, again.data_hash) == (made.model_hash, made.data_hash)
    assert all(a.equal(b) for a, b in zip(again.clients, made.clients, strict=True))
    assert again.train.labels.equal(made.train.labels)


def test_the_seed_decides_weights_and_clients_and_leaves_torch_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = task("digits")
    assert torch.rand(3).equal(expected)
    again, other = task("digits"), task("digits", seed=1)
    assert first.model_hash == again.model_hash != other.model_hash
    assert first.clients[0].equal(again.clients[0])
    assert not first.clients[0].equal(other.clients[0])
    assert first.data_hash == other.data_hash


def test_a_limit_is_of_the_task_and_of_its_holdings() -> None:
    few = task("digits", limit=20)
    assert len(few.train) == sum(len(indices) for indices in few.clients) == 20
    assert len(few.test) == 256
    assert client_labels(few) == client_labels_of("digits", limit=20)
    assert len(task("digits", limit=10**6).train) == 1293


def test_a_spec_and_a_module_serve_as_models() -> None:
    spec = models.parse("mlp:hidden=[8]")
    assert task("digits", model=spec).model_hash == task("digits", model="mlp:hidden=[8]").model_hash
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    made = task("digits", model=own)
    assert made.model is own
    assert made.model_name == made.description["model"] == "Sequential"


def test_files_are_read_from_the_root_given(tmp_path: Path, write_mnist: Callable[..., Path]) -> None:
    write_mnist(tmp_path / "mnist")
    made = task("mnist", clients=2, data_root=str(tmp_path))
    assert made.shape == (1, 28, 28)
    assert len(made.train) == 36
    assert task("mnist", data_root=tmp_path, split="70/15/15").data_hash == made.data_hash
    assert len(task("mnist", data_root=tmp_path, split="80/20").train) == 40


def test_real_mnist_is_normalized(real_data: Path) -> None:
    made = task("mnist", data_root=real_data)
    inputs, _ = made.train.batch(range(2000))
    assert isinstance(inputs, Tensor)
    assert abs(inputs.mean()) < 0.05
    assert abs(inputs.std() - 1) < 0.05


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"name": "digit"}, "unknown data set 'digit': did you mean 'digits'"),
        ({"model": "lenett"}, "unknown model 'lenett'"),
        ({"model": "lenet5"}, "at least 12×12 pixels, got 8×8"),
        ({"model": "mlp:depth=3"}, "no field 'depth'"),
        ({"model": nn.Linear(3, 10)}, r"does not take a batch of shape \(2, 1, 8, 8\): RuntimeError"),
        ({"clients": 2000}, "2000 clients cannot share 1293"),
        ({"clients": 0}, "at least 1"),
        ({"limit": 3, "clients": 4}, "4 clients cannot share 3"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"clients": [range(5)]}, "clients must be a number here"),
        ({"split": "half"}, "unknown split 'half'"),
        ({"partition": "iidd"}, "unknown partition 'iidd': did you mean 'iid'"),
        ({"partition": 3}, "partition must be a name"),
        ({"buffers": "lost"}, "buffers must be one of shared, local, recalibrated"),
    ],
)
def test_wrong_settings_get_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(FedveilError, match=line) as caught:
        task(**{"name": "digits", **settings})
    assert "\n" not in str(caught.value)


# ---- bring your own ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, sizes",
    [
        (TensorDataset(X, Y), (28, 6, 6)),
        ((X, Y), (28, 6, 6)),
        ((X.numpy(), Y.numpy().astype(np.uint8)), (28, 6, 6)),
        (((X, Y), (X[:7], Y[:7])), (40, None, 7)),
        ((TensorDataset(X, Y), (X[:5], Y[:5]), (X[:7], Y[:7])), (40, 5, 7)),
        ([(X, Y), TensorDataset(X[:7], Y[:7])], (40, None, 7)),
    ],
)
def test_data_in_every_form(data: Any, sizes: tuple[int | None, ...]) -> None:
    made = Task(linear(), data)
    parts = (made.train, made.validation, made.test)
    assert tuple(None if part is None else len(part) for part in parts) == sizes
    assert (made.classes, made.shape, made.normalization) == (3, (5,), None)
    assert made.loss is functional.cross_entropy
    assert len(made.clients) == 4
    assert made.model_name == "Linear"
    json.dumps(made.description)


def test_any_object_with_length_and_items_is_a_dataset() -> None:
    class Plain:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return X[index], int(Y[index])

    assert len(Task(linear(), Plain(), split="60/40", clients=2).train) == 5


def test_images_of_ones_own_are_normalized_on_request() -> None:
    images = torch.randint(0, 256, (10, 3, 6, 6), dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    halves = Normalization((0.5,) * 3, (0.5,) * 3)
    data = ((images, torch.arange(10) % 2), (images[:2], torch.tensor([0, 1])))
    made = Task(model, data, normalization=halves)
    assert torch.allclose(made.train.batch([4])[0], images[4:5] / 127.5 - 1, atol=1e-6)  # type: ignore[arg-type]


def test_named_parts_go_to_the_model_by_keyword() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(9, 3)

        def forward(self, ids: Tensor, extra: Tensor) -> Tensor:
            scores: Tensor = self.head(torch.cat([self.embed(ids).mean(1), extra], 1))
            return scores

    data = {"ids": torch.randint(0, 10, (40, 6)), "extra": X}
    made = Task(Two(), (data, Y), perturb="extra")
    assert made.shape == (5,)
    assert made.perturb == "extra"
    with pytest.raises(FedveilError, match="no part 'ex': name one of ids, extra"):
        Task(Two(), (data, Y), perturb="ex")
    with pytest.raises(FedveilError, match="'ids', holds whole numbers"):
        Task(Two(), (data, Y), perturb="ids")


def test_a_loss_of_ones_own_decides_what_labels_mean() -> None:
    def binary(output: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(output.squeeze(1), targets.float())

    made = Task(linear(1), (X, Y % 2), loss=binary)
    assert made.classes is None
    assert made.loss is binary


def test_clients_of_ones_own() -> None:
    made = Task(linear(), ((X, Y), (X, Y)), clients=[[0, 1, 2], torch.tensor([5])])
    assert [indices.tolist() for indices in made.clients] == [[0, 1, 2], [5]]
    for wrong in ([], [[0], []], [[40]], [[-1]]):
        with pytest.raises(FedveilError, match="client"):
            Task(linear(), ((X, Y), (X, Y)), clients=wrong)


def test_the_check_leaves_the_model_and_torch_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    made = Task(model, (X, Y))
    assert torch.rand(2).equal(expected)
    assert [module.training for module in model] == [True, False, True, True]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert made.model is model


def test_hashes_tell_models_and_data_apart() -> None:
    made = Task(linear(), (X, Y))
    before = made.model_hash
    with torch.no_grad():
        made.model.bias[0] += 1  # type: ignore[union-attr, index, operator]
    assert made.model_hash != before
    assert made.data_hash == Task(linear(), (X.clone(), Y.clone())).data_hash
    assert made.data_hash != Task(linear(), (X + 1, Y)).data_hash


def test_a_task_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Task(linear(), (X, Y)).name = "other"  # type: ignore[misc]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(X[0], 0)])


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X[0], 0


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def nan() -> nn.Module:
    model = nn.Linear(5, 3)
    nn.init.constant_(model.bias, float("nan"))
    return model


@pytest.mark.parametrize(
    "model, data, line",
    [
        (nn.Flatten(), (X, Y), "Flatten has no parameters that require gradients"),
        (frozen(), (X, Y), "Linear has no parameters that require gradients"),
        (nn.LazyLinear(3), (X, Y), "lazy layers"),
        (nan(), (X, Y), "weights contain NaN or infinity: bias"),
        (max, (X, Y), "must be a torch.nn.Module, not builtin"),
        (linear(), (X / 0, Y), "NaN or infinity"),
        (linear(), (X[:, :4], Y), r"does not take a batch of shape \(2, 4\)"),
        (linear(2), (X, Y), "label 2 in the training data, but the model has 2 outputs: .*0 to 1"),
        (linear(), ((X, Y), (X, Y + 1)), "label 3 in the test data, but the model has 3 outputs"),
        (linear(), (X, Y - 1), "label -1"),
        (linear(1), (X, Y * 0), "one output per example"),
        (
            nn.Sequential(nn.Linear(5, 3), nn.Flatten(0)),
            (X, Y),
            r"gives \(6,\) for a batch of 2, expected \(2, classes\)",
        ),
        (linear(), (X, Y.float()), "if the targets are classes, give whole numbers"),
        (linear(), (X, torch.stack([Y, Y], 1)), r"must be 0 or 1; class numbers have shape \(N,\), not \(40, 2\)"),
        (linear(), (X, Y[:-1]), "40 inputs but 39 labels"),
        (linear(), (X[:0], Y[:0]), "0 examples|is empty"),
        (linear(), ((X, Y), (X[:0], Y[:0])), "test data is empty"),
        (linear(), TensorDataset(X[:0], Y[:0]), "data is empty"),
        (linear(), (np.array(["a"]), Y[:1]), "must hold numbers, not"),
        (linear(), Stream(), "Stream can only be iterated over: give a map-style"),
        (linear(), Unsized(), "Unsized has no length"),
        (linear(), X, "cannot read data of type Tensor: give a torch Dataset"),
        (linear(), (X, Y, X, Y), "cannot read data of type tuple of Tensor"),
        (linear(), None, "there is no data: give a torch Dataset"),
        (nn.Linear(5, 3, dtype=torch.complex64), (X, Y), "weights weight are complex: use real ones"),
        (linear(), (X[:3], Y[:3]), "4 clients cannot share 1 training"),
    ],
)
def test_wrong_tasks_get_one_line(model: Any, data: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line) as caught:
        Task(model, data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "loss, line",
    [
        (lambda output, targets: output.sum(1), r"one number, the mean over the batch, not a tensor of shape \(2,\)"),
        (lambda output, targets: 1.0, "one number, the mean over the batch, not float"),
        (lambda output, targets: output.detach().sum(), "does not depend on the model's parameters"),
        (lambda output, targets: output.sum() / 0, "the loss of the untrained model is"),
        (lambda output, targets: output.missing, "the loss fails on the model's output: AttributeError"),
    ],
)
def test_wrong_losses_get_one_line(loss: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        Task(linear(), (X, Y), loss=loss)


def test_settings_that_do_not_go_together_are_said() -> None:
    with pytest.raises(FedveilError, match="no parts of its own"):
        Task(linear(), (X, Y), split="own")
    with pytest.raises(FedveilError, match="come in parts already: leave the split out"):
        Task(linear(), ((X, Y), (X, Y)), split="80/20")
    with pytest.raises(FedveilError, match="leave the partition out"):
        Task(linear(), (X, Y), clients=[range(20), range(20, 40)], partition="shards")
