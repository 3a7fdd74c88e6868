from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import configuration
from fedveil.federation.plan import Plan
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.tasks.task import Task, client_labels, client_labels_of, task
from fedveil.workers import Lodged, Workers, lodged_value

OWN = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import fedveil as fv
from neighbor import WIDTH


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))

    def forward(self, x):
        return self.layers(x)


def small(classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


ready = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


class Pictures(Dataset):
    classes = ["cat", "dog", "e\\x1b[31mel"]

    def __len__(self):
        return 120

    def __getitem__(self, place):
        return (torch.full((1, 8, 8), place / 120) - 0.5) / 0.25, place % 3


def halved(output, targets):
    return functional.cross_entropy(output, targets) / 2


arrays = (torch.rand(120, 1, 8, 8), torch.arange(120) % 3)


def hospitals():
    return {
        "data": Pictures(),
        "clients": [range(0, 40), range(40, 120)],
        "normalization": fv.Normalization((0.5,), (0.25,)),
        "normalized": True,
        "loss": halved,
    }


strange = {"data": arrays, "batch": 3}
number = 3


def needy(width):
    return None
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN.replace("shape.numel()", "shape[0] * shape[1] * shape[2]"))
    (tmp_path / "neighbor.py").write_text("WIDTH = 5\n")
    sys.modules.pop("neighbor", None)  # of another test
    sys.path[:] = [folder for folder in sys.path if not (Path(folder) / "own.py").exists()]
    return tmp_path / "own.py"


def test_which_texts_name_a_file() -> None:
    assert is_reference("a.py:Net")
    assert is_reference("/some folder/x=1/a.py:Net")
    for other in ("digits", "resnet18:norm=group", "image-folder:path=a.py,size=3", "a.py", None, nn.Flatten()):
        assert not is_reference(other)


def test_models_and_data_come_from_files(own: Path) -> None:
    made = task(f"{own}:Pictures", model=f"{own}:Net", clients=3)
    assert (made.name, made.model_name, made.classes, made.shape) == ("own.py:Pictures", "Net", 3, (1, 8, 8))
    assert made.label_names == ("cat", "dog", "e\\x1b[31mel")
    assert sum(p.numel() for p in made.model.parameters()) == 64 * 5 + 5 + 5 * 3 + 3
    assert [len(made.train), len(made.test)] == [84, 18]
    assert client_labels(made) == client_labels_of(f"{own}:Pictures", clients=3)
    for data in ("arrays", "Pictures", "digits"):
        for model in ("Net", "small", "ready"):
            if (data, model) != ("digits", "ready"):  # three outputs
                name = data if data == "digits" else f"{own}:{data}"
                assert task(name, model=f"{own}:{model}").model_name == model
    assert task(f"{own}:arrays", model="mlp:hidden=[4]").model_name == "mlp"
    assert len(task(f"{own}:arrays", model="mlp", split="50/50", limit=30).train) == 30


def test_a_dict_says_everything_that_a_task_takes(own: Path) -> None:
    made = task(f"{own}:hospitals", model=f"{own}:Net")
    assert [len(places) for places in made.clients] == [28, 56]
    assert made.normalization == fv.Normalization((0.5,), (0.25,))
    assert made.loss.__name__ == "halved"  # type: ignore[attr-defined]
    assert client_labels(made) == client_labels_of(f"{own}:hospitals")
    assert client_labels(made).partition == ""
    assert len(task(f"{own}:hospitals", model=f"{own}:Net", clients=2).clients) == 2
    with pytest.raises(FedveilError, match="says who its clients are: leave the number of clients out"):
        task(f"{own}:hospitals", model=f"{own}:Net", clients=8)
    with pytest.raises(FedveilError, match="leave the partition out"):
        task(f"{own}:hospitals", model=f"{own}:Net", partition="shards")


def test_the_description_rebuilds_it_in_any_folder(
    own: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    made = task("own.py:hospitals", model="own.py:Net", seed=3)
    assert made.description["model"] == f"{own}:Net"
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = task(**made.description)
    assert again.description == made.description
    assert (again.model_hash, again.data_hash) == (made.model_hash, made.data_hash)
    assert made.model_hash != task(**{**made.description, "seed": 4}).model_hash


def test_changed_files_are_other_tasks(own: Path) -> None:
    def checked() -> dict[str, object]:
        made = task(f"{own}:hospitals", model=f"{own}:Net")
        return configuration(Plan(made, Chain(), fv.FederationSettings()))

    before = checked()
    assert "ReLU" in str(task("digits", model=f"{own}:Net").model)
    assert checked() == before
    state = own.stat()
    own.write_text(own.read_text().replace("nn.ReLU()", "nn.Tanh()"))
    os.utime(own, ns=(state.st_atime_ns, state.st_mtime_ns))  # as quick as an editor can be
    after = checked()
    assert "Tanh" in str(task("digits", model=f"{own}:Net").model)
    assert after["initial model"] != before["initial model"]
    assert after["data"] == before["data"]
    own.write_text(own.read_text().replace("place / 120", "place / 121"))
    assert checked()["data"] != before["data"]


def _summed_there(place: Lodged) -> float:
    return _summed(lodged_value(place))


def _summed(made: Task) -> float:
    inputs, targets = made.train.batch(range(8))
    return float(made.loss(made.model(inputs), targets).detach())


def test_tasks_of_files_reach_worker_processes(own: Path) -> None:
    made = task(f"{own}:hospitals", model=f"{own}:Net")
    with Workers(1) as workers:
        place = workers.lodge(made)
        found = list(workers.map(_summed_there, [place]))
    assert found == [pytest.approx(_summed(made))]


@pytest.mark.parametrize(
    "data, model, line",
    [
        ("digits", "gone.py:Net", "there is no file .*gone.py$"),
        ("digits", "own.py:Nett", "unknown name in own.py 'Nett': did you mean 'Net'?"),
        ("digits", "own.py:", "cannot read '.*own.py:': write file.py:name"),
        ("digits", "own.py:number", "own.py:number must be or return a torch.nn.Module, not int"),
        ("digits", "own.py:needy", r"own.py:needy needs width \(only shape and classes can be given\): give defaults"),
        ("own.py:needy", "mlp", "own.py:needy needs width: give defaults"),
        ("own.py:number", "mlp", "own.py:number: cannot read data of type int"),
        ("own.py:strange", "mlp", "own.py:strange has batch: it may have data, clients"),
        ("broken.py:dataset", "mlp", "^broken.py line 3: ZeroDivisionError: division by zero$"),
        ("unread.py:dataset", "mlp", "^unread.py line 2: SyntaxError: "),
        ("exits.py:dataset", "mlp", "^exits.py line 1: SystemExit: 3$"),
        ("raises.py:dataset", "mlp", "^raises.py line 2: KeyError: 'x'$"),
        ("lacks.py:dataset", "mlp", "^lacks.py line 1: ModuleNotFoundError: No module named 'nowhere'$"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(own: Path, data: str, model: str, line: str) -> None:
    (own.parent / "broken.py").write_text("a = 0\n\nb = 1 / a\n")
    (own.parent / "unread.py").write_text("a = 0\nb = = 1\n")
    (own.parent / "exits.py").write_text("raise SystemExit(3)\n")
    (own.parent / "raises.py").write_text("def dataset():\n    return {}['x']\n")
    (own.parent / "lacks.py").write_text("import nowhere\n")
    name = data if data == "digits" else f"{own.parent / data}"
    with pytest.raises(FedveilError, match=line) as caught:
        task(name, model=model if model == "mlp" else f"{own.parent / model}")
    assert "\n" not in str(caught.value)


def test_naming_a_file_does_not_run_it(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("raise SystemExit('was run')\n")
    reference = Reference.read(f"{tmp_path / 'loud.py'}:Net")
    assert (reference.short, len(reference.sha256())) == ("loud.py:Net", 64)
    with pytest.raises(FedveilError, match="was run"):
        reference.load()


def test_an_installed_module_is_not_hidden_by_a_neighbor(own: Path) -> None:
    (own.parent / "torch.py").write_text("raise SystemExit('hidden')\n")
    assert isinstance(task(f"{own}:arrays", model=f"{own}:small").train.labels, torch.Tensor)
