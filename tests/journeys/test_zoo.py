"""The model zoo: every data set and model of the five papers trains under every registered defense.

Pictures are noise of the right shape with labels of the right number, models are narrow where they have a width, and a
run is one or two steps: this is about what fits together, not about what is learned. Pictures of 256 pixels have 72
here, which is the same stem, but for one real step each. Texts are the first lines of the real sets where this checkout
has them beside it, else made up. What cannot fit together is refused in one line.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.clients.engine import Backend, Tensors
from fedveil.federation.run import Run
from fedveil.registry import defenses, models
from fedveil.tasks.task import build_model


@dataclass(frozen=True)
class Data:
    """What a data set looks like. Where the papers give no channel statistics, those of noise stand in."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.29,)
    several: bool = False  # labels per picture

    @property
    def normalization(self) -> fv.Normalization:
        wide = self.shape[0] // len(self.mean)
        return fv.Normalization(self.mean * wide, self.std * wide)


MNIST = Data((1, 28, 28), 10, (0.1307,), (0.3081,))
FMNIST = Data((1, 28, 28), 10, (0.2860,), (0.3530,))
CIFAR10 = Data((3, 32, 32), 10, (0.4915, 0.4823, 0.4468), (0.2470, 0.2435, 0.2616))
CIFAR100 = Data((3, 32, 32), 100)
TINY_IMAGENET = Data((3, 64, 64), 200)
IMAGENET = Data((3, 72, 72), 1000)  # 256 pixels in the paper; above 64 the stem is the large one
NIH = Data((1, 72, 72), 14, several=True)  # 256 pixels in the paper
BLOOD = Data((3, 28, 28), 8)
PNEUMONIA = Data((1, 28, 28), 2, (0.5719,), (0.1684,))
OCT = Data((1, 28, 28), 4)
BREAST = Data((1, 28, 28), 2, (0.3276,), (0.2057,))
# How the command line writes the sets of text; a tenth of CoLA would be too little for validation.
COLA = "cola:length=10"
SST2 = "sst2:length=10"
WIKITEXT2 = "wikitext2:length=10,vocabulary=300"


@dataclass(frozen=True)
class Pair:
    """A data set and a model of some paper."""

    data: Data | str
    model: str
    clients: int = 4
    examples: int = 4  # of each client, in batches of 2
    backend: Backend = "stacked"


PAIRS = {
    # FedEM; FedBARRE has the same for MNIST, FMNIST and CIFAR-100
    "mnist-lenet": Pair(MNIST, "lenet"),
    "fmnist-lenet": Pair(FMNIST, "lenet"),
    "cifar10-convnet": Pair(CIFAR10, "convnet:width=4"),
    "cifar100-resnet18": Pair(CIFAR100, "resnet18:width=2", examples=2),
    "cifar100-resnet18-group": Pair(CIFAR100, "resnet18:width=2,norm=group"),
    "tiny-imagenet-resnet18": Pair(TINY_IMAGENET, "resnet18:width=1", examples=2),
    # Three clients: Duchi's two values of an even number can cancel out, and BERT's last bias starts at zero.
    "cola-bert": Pair(COLA, "bert:width=8,layers=1,heads=2", clients=3),
    "sst2-bert": Pair(SST2, "bert:width=8,layers=1,heads=2", clients=3, backend="loop"),
    "wikitext2-gpt2": Pair(WIKITEXT2, "gpt2:width=8,layers=1,heads=2"),
    # Gradient Dropout
    "cifar10-resnet18-sigmoid": Pair(CIFAR10, "resnet18:width=2,activation=sigmoid", examples=2),
    "fmnist-resnet18-sigmoid": Pair(FMNIST, "resnet18:width=2,activation=sigmoid", examples=2),
    "imagenet-resnet18-sigmoid": Pair(IMAGENET, "resnet18:width=1,activation=sigmoid", examples=2),
    "nih-resnet18-sigmoid": Pair(NIH, "resnet18:width=2,activation=sigmoid", examples=2),
    "cifar10-lenet5": Pair(CIFAR10, "lenet5"),
    "fmnist-lenet5": Pair(FMNIST, "lenet5"),
    # SPM-FL; FedBARRE has the ResNet-18 too
    "mnist-mlp": Pair(MNIST, "mlp:hidden=[16]"),
    "fmnist-mlp": Pair(FMNIST, "mlp:hidden=[16]"),
    "cifar10-cnn": Pair(CIFAR10, "cnn", clients=2, examples=2),  # it has no width: one step of two clients
    "cifar10-resnet18": Pair(CIFAR10, "resnet18:width=2"),
    # FedCRAP
    "mnist-resnet18": Pair(MNIST, "resnet18:width=2", examples=2),
    "fmnist-resnet18": Pair(FMNIST, "resnet18:width=2", examples=2),
    "blood-resnet18": Pair(BLOOD, "resnet18:width=2", examples=2),
    "pneumonia-resnet18": Pair(PNEUMONIA, "resnet18:width=2", examples=2),
    "oct-resnet18": Pair(OCT, "resnet18:width=2", examples=2),
    "breast-resnet18": Pair(BREAST, "resnet18:width=2", backend="loop"),
}
# Settings that are quick, or that act on small updates too; the other defenses run as they are.
SETTINGS = {
    "clip": "clip:norm=0.01",
    "fedbarre": "fedbarre:models=2,pgd_steps=1",  # on ResNet-18 one model only, but for one pair
    "fedcrap": "fedcrap:steps=1",
    "fedem": "fedem:steps=1",
    "ppfa": "ppfa:steps=1",
    "soteria": "soteria:features=4",
}
DEFENSES = [name for name in defenses.entries() if name != "none"]
# DP-SGD needs the gradient of every single example, which a batch norm does not leave. It trains with the others.
BATCH_NORM = (
    "cifar10-convnet",
    "cifar100-resnet18",
    "tiny-imagenet-resnet18",
    "cifar10-resnet18-sigmoid",
    "fmnist-resnet18-sigmoid",
    "imagenet-resnet18-sigmoid",
    "nih-resnet18-sigmoid",
    "cifar10-resnet18",
    "mnist-resnet18",
    "fmnist-resnet18",
    "blood-resnet18",
    "pneumonia-resnet18",
    "oct-resnet18",
    "breast-resnet18",
)
REFUSED = {(pair, "dp-sgd"): "per-example gradients do not exist under batch norm" for pair in BATCH_NORM}
# The output layer of GPT-2 is its table of embeddings, and the others are of a kind of their own.
REFUSED["wikitext2-gpt2", "soteria"] = "soteria needs a model with a trained linear layer: this one has none"


def make_task(pair: Pair, *, validation: bool = True) -> fv.Task:
    """Noise in the pair's shape, divided evenly; labels go up to the last class."""
    data, count = pair.data, pair.clients * pair.examples
    if isinstance(data, str):
        split = "own:validation=0.2" if data == COLA else "own"
        return fv.task(data, model=pair.model, clients=pair.clients, split=split, data_root=texts(), limit=count)
    random = np.random.default_rng(0)

    def part(size: int) -> tuple[np.ndarray, np.ndarray]:
        images = random.integers(0, 256, (size, *data.shape), dtype=np.uint8)
        if data.several:
            return images, random.integers(0, 2, (size, data.classes)).astype(np.float32)
        return images, (data.classes - 1 - np.arange(size)) % data.classes

    parts = (part(count), part(pair.clients), part(4)) if validation else (part(count), part(4))
    model = build_model(models.parse(pair.model), data.shape, data.classes, seed=0)
    return fv.Task(model, parts, clients=pair.clients, normalization=data.normalization)


REAL = Path(__file__).parents[3] / "shared" / "data" / "text"


def lines(file: str, made_up: str, count: int) -> str:
    """The first lines of a real file, or so many copies of a made-up one with other words in it."""
    if (REAL / file).is_file():
        with (REAL / file).open(encoding="utf-8") as real:
            return "".join(itertools.islice(real, count))
    words = ("river", "stone", "light", "paper")
    return "".join(made_up.format(label=place % 2, word=words[place % 4]) + "\n" for place in range(count))


@functools.cache
def texts() -> Path:
    """Files of the three sets of text, as they are distributed but short."""
    folder = Path(tempfile.mkdtemp(prefix="fedveil-zoo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for part, count in (("in_domain_train", 20), ("in_domain_dev", 3), ("out_of_domain_dev", 3)):
        write(
            folder / f"cola/{part}.tsv", lines(f"cola/{part}.tsv", "gj04\t{label}\t\tThe {word} sank the boat.", count)
        )
    for part, count in (("train", 16), ("dev", 4), ("test", 4)):
        write(folder / f"sst2/{part}.tsv", lines(f"sst2/{part}.tsv", "a {word} of charm and wit\t{label}", count))
    for part, file, count in (("train", "valid", 24), ("valid", "test", 12), ("test", "test", 12)):
        text = lines(
            f"wikitext-2/{file}.txt", " The {word} was rebuilt in 188{label} , and again after the war . ", count
        )
        write(folder / f"wikitext-2/wiki.{part}.tokens", text)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


task_of = functools.cache(lambda name: make_task(PAIRS[name]))


def spec_of(pair: str, defense: str) -> str:
    if defense == "fedbarre" and "resnet18" in pair and pair != "cifar10-resnet18":
        return "fedbarre:models=1,pgd_steps=1"
    if defense == "clip" and "bert" in pair:
        # A new BERT hardly tells sentences apart: where a batch has both labels its gradient has the norm 4e-4, else
        # 0.7, and all batches may have both.
        return "clip:norm=1e-4"
    return SETTINGS.get(defense, defense)


def protocol_of(defense: str) -> str:
    """FedSGD, but for defenses that protect weights only."""
    return "fedsgd" if "gradient" in defenses.parse(defense).of else "fedavg"


def train(task: fv.Task, defense: str | None, protocol: str, backend: Backend = "stacked") -> Run:
    settings = fv.FederationSettings(protocol=protocol, rounds=1, batch_size=2)
    return fv.federate(task, defense, settings, backend=backend)


@functools.cache
def undefended(name: str) -> Tensors:
    return train(task_of(name), None, "fedsgd", PAIRS[name].backend).params


def check(run: Run, task: fv.Task) -> None:
    """The outcome is a trained model of the same form, and the round is on record."""
    start = {name: parameter.detach() for name, parameter in task.model.named_parameters()}
    assert {name: (t.shape, t.dtype) for name, t in run.params.items()} == {
        name: (t.shape, t.dtype) for name, t in start.items()
    }
    buffers = dict(task.model.named_buffers())
    assert {name: t.shape for name, t in run.buffers.items()} == {name: t.shape for name, t in buffers.items()}
    for name, tensor in {**run.params, **run.buffers}.items():
        assert torch.isfinite(tensor).all(), name
    for name in (next(iter(start)), *list(start)[-2:]):  # the first layer, and the last one's weight and bias
        assert not torch.equal(run.params[name], start[name]), name
    assert [record.round for record in run.history] == [1]
    record = run.history[0]
    assert record.clients == list(range(len(task.clients)))
    assert np.isfinite(record.train_loss)
    assert record.bytes_up >= sum(tensor.numel() * tensor.element_size() for tensor in start.values())
    assert record.utility == run.utility
    assert run.utility.test is not None
    assert 0 <= run.utility.test <= 1 or (run.utility.metric == "perplexity" and run.utility.test >= 1)


@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_pair_trains_under_the_defense_or_is_refused(pair: str, defense: str) -> None:
    task, spec = task_of(pair), spec_of(pair, defense)
    protocol, backend = protocol_of(spec), PAIRS[pair].backend
    if (pair, defense) in REFUSED:
        with pytest.raises(fv.FedveilError, match=REFUSED[pair, defense]) as refused:
            train(task, spec, protocol, backend)
        assert "\n" not in str(refused.value)
        return
    run = train(task, spec, protocol, backend)
    assert run.backend == backend
    check(run, task)
    if protocol == "fedsgd":
        plain = undefended(pair)
        assert any(not torch.equal(run.params[name], plain[name]) for name in plain), "the defense did nothing"


@pytest.mark.parametrize("data", [IMAGENET, NIH], ids=["imagenet", "nih"])
def test_one_step_at_256_pixels(data: Data) -> None:
    large = Data((data.shape[0], 256, 256), data.classes, several=data.several)
    task = make_task(Pair(large, "resnet18:width=1,activation=sigmoid", clients=2, examples=1))
    check(train(task, "gradient-dropout", "fedsgd"), task)


@pytest.mark.parametrize("spec", ["duchi", "ldp-fl", "pm", "ppfa"])
def test_defenses_of_weights_are_refused_where_gradients_are_sent(spec: str) -> None:
    with pytest.raises(fv.FedveilError, match=r"would meet a gradient: use the protocol fedavg$") as refused:
        train(task_of("mnist-mlp"), spec, "fedsgd")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("spec", ["dp-clip:at=upload", "dp-gaussian:at=upload", "dp-laplace:at=upload"])
def test_clipped_noise_is_refused_where_whole_weights_are_sent(spec: str) -> None:
    with pytest.raises(fv.FedveilError, match=r"would meet weights: use upload='delta'$") as refused:
        train(task_of("mnist-mlp"), spec, "fedavg")
    assert "\n" not in str(refused.value)


def test_fedbarre_is_refused_without_validation_data() -> None:
    task = make_task(PAIRS["mnist-lenet"], validation=False)
    with pytest.raises(fv.FedveilError, match="needs validation data of each client's own") as refused:
        train(task, SETTINGS["fedbarre"], "fedsgd")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["fedem", "fedcrap"])
def test_color_statistics_are_refused_on_gray_pictures(name: str) -> None:
    with pytest.raises(fv.FedveilError, match=f"{name}: std has 3 channels") as refused:
        train(task_of("breast-resnet18"), f"{name}:steps=1,std=[0.25,0.25,0.25]", "fedsgd")
    assert "\n" not in str(refused.value)
