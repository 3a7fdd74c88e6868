"""Models of text: what they compute, on every backend, under the data defenses, and from the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fedveil as fv
from fedveil.clients.batch import ClientBatch
from fedveil.clients.choose import why_not_stacked
from fedveil.clients.engine import Engine
from fedveil.defenses.ball import top_share
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.registry import datasets, defenses, models
from fedveil.streams import Streams
from fedveil.tasks.task import client_labels_of, label_table
from fedveil.tasks.tokens import IGNORED, next_token_hits, next_token_loss
from fedveil.tasks.vocabulary import vocabulary_of
from fedveil.tree import Tree
from journeys.console import fedveil, refused

__all__ = ["fedveil"]

BERT = "bert:width=8,layers=2,heads=2"
GPT2 = "gpt2:width=8,layers=2,heads=2"
SUBJECTS = ("the river", "a stone", "every light of the old town", "paper", "no one", "the boat that left")
VERBS = ("sank", "was rebuilt", "sang and sang again", "fell", "rose", "burned through the night")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    lines = [f"{subject} {verb}" for subject in SUBJECTS for verb in VERBS]
    parts = {"train": lines[:24], "dev": lines[24:30], "test": lines[30:]}
    for name in ("sst2", "wikitext-2"):
        (folder / name).mkdir()
    for part, held in parts.items():
        rows = (f"{line}\t{number % 2}\n" for number, line in enumerate(held))
        (folder / f"sst2/{part}.tsv").write_text("".join(rows))
        wiki = {"dev": "valid"}.get(part, part)
        (folder / f"wikitext-2/wiki.{wiki}.tokens").write_text("".join(f" {line} . \n" for line in held))
    return folder


def make(root: Path, model: str, data: str = "", **more: Any) -> fv.Task:
    name = ("sst2" if model.startswith("bert") else "wikitext2") + (data or ":length=9")
    return fv.task(name, model=model, clients=3, data_root=root, **more)


def stacked(task: fv.Task, size: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    """A batch of every client."""
    held = [task.train.batch(indices[:size]) for indices in task.clients]
    inputs = {name: torch.stack([each[name] for each, _ in held]) for name in held[0][0]}
    return inputs, torch.stack([targets for _, targets in held])


def client_batch(task: fv.Task, backend: str = "stacked", size: int = 2) -> ClientBatch:
    inputs, targets = stacked(task, size)
    engine = Engine(task.model, task.loss, backend=backend, perturb=task.perturb)
    params = Tree.expand({name: p.detach() for name, p in task.model.named_parameters()}, len(targets))
    return ClientBatch(engine, params, Tree({}), inputs, targets, Streams.seeded(0, range(len(targets))))


@pytest.mark.parametrize("model", [BERT, GPT2])
def test_the_scores_are_those_of_the_library_at_moved_embeddings(root: Path, model: str) -> None:
    task = make(root, model)
    inputs, _ = task.train.batch(list(range(len(task.train))))
    assert isinstance(inputs, dict)
    real = inputs["attention_mask"].bool()
    assert (~real).any()
    network = type(task.model.network)(task.model.network.config)
    network.load_state_dict(task.model.network.state_dict())
    move = torch.randn(inputs["offset"].shape, generator=torch.Generator().manual_seed(0))
    for offset in (inputs["offset"], move):
        moved = network.get_input_embeddings()(inputs["input_ids"]) + offset
        plain = network(inputs_embeds=moved, attention_mask=inputs["attention_mask"]).logits
        found = task.model(**{**inputs, "offset": offset})
        kept = real if model == GPT2 else ...
        assert torch.allclose(found[kept], plain[kept], atol=1e-6)
    assert not torch.allclose(found[kept], task.model(**inputs)[kept], atol=1e-3)


@pytest.mark.parametrize("model", [BERT, GPT2, f"{BERT},dropout=0.3", f"{GPT2},dropout=0.3"])
def test_backends_give_the_same_gradients(root: Path, model: str) -> None:
    task = make(root, model)
    sample = task.train.batch([0, 1])
    assert why_not_stacked(task.model, task.loss, sample, task.perturb) is None
    loop, stack = client_batch(task, "loop"), client_batch(task, "stacked")
    for kind in ("gradient", "example_gradients"):
        one, other = getattr(loop, kind)(), getattr(stack, kind)()
        assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one), kind
        assert all(tensor.any() for name, tensor in one.items() if "embeddings" in name or "wte" in name)
    assert torch.allclose(loop.input_gradient(), stack.input_gradient(), atol=1e-5)


@pytest.mark.parametrize("model", [BERT, GPT2])
def test_padding_says_nothing(root: Path, model: str) -> None:
    task = make(root, model)
    inputs, targets = task.train.batch(list(range(len(task.train))))
    assert isinstance(inputs, dict)
    padding = inputs["attention_mask"] == 0
    other = {**inputs, "input_ids": inputs["input_ids"].masked_fill(padding, 5)}
    assert padding.any()
    assert torch.equal(task.loss(task.model(**inputs), targets), task.loss(task.model(**other), targets))
    slope = client_batch(task, size=len(min(task.clients, key=len))).input_gradient()
    real = stacked(task, slope.shape[1])[0]["attention_mask"].bool()
    assert not slope[~real].any()
    assert slope[real].any()


def test_the_loss_and_the_hits_of_next_tokens(root: Path) -> None:
    task = make(root, GPT2)
    inputs, targets = task.train.batch(list(range(len(task.train))))
    assert isinstance(inputs, dict)
    assert (targets == IGNORED).any()
    scores = task.model(**inputs)
    wanted = task.model.network.loss_function(logits=scores, labels=targets, vocab_size=scores.shape[-1])
    assert torch.allclose(next_token_loss(scores, targets), wanted)
    hits = next_token_hits(functional.one_hot(targets.clamp_min(0).roll(-1, 1), 400), targets)
    assert hits.all()
    assert len(hits) == int((targets[:, 1:] != IGNORED).sum())
    assert not next_token_hits(functional.one_hot(targets.clamp_min(0).roll(-1, 1) + 1, 400), targets).any()


def test_a_task_of_text(root: Path) -> None:
    task = make(root, BERT, split="70/15/15")
    assert (task.perturb, task.shape, task.classes, task.labels) == ("offset", (9, 8), 2, None)
    assert len(task.train) == 25
    again = fv.task(**task.description, data_root=root)
    assert (again.data_hash, again.model_hash) == (task.data_hash, task.model_hash)
    assert fv.task(**{**task.description, "seed": 1}, data_root=root).model_hash != task.model_hash
    assert make(root, BERT, ":length=10").data_hash != task.data_hash
    assert not dict(task.model.named_buffers())
    assert client_labels_of("sst2", clients=3, split="70/15/15", data_root=root).counts == label_table(task)
    words = make(root, GPT2)
    assert (words.perturb, words.classes, words.labels) == ("offset", None, None)
    assert label_table(words) == [[], [], []]
    with pytest.raises(FedveilError, match="running text"):
        client_labels_of("wikitext2", data_root=root)


@pytest.mark.parametrize(
    "data, model, words",
    [
        ("sst2", "lenet", "sst2 is text, which lenet does not take: use bert"),
        ("wikitext2", "mlp", "wikitext2 is text, which mlp does not take: use gpt2"),
        ("sst2", "gpt2", "gpt2 predicts text, and sst2 has classes: use bert"),
        ("wikitext2", "bert", "bert classifies, and wikitext2 has none: use gpt2"),
        ("digits", "bert", "bert takes text"),
        ("sst2:length=600", "bert", "bert takes at most 512 tokens"),
        ("sst2", "bert:width=10,heads=3", "width must be a multiple of heads"),
        ("sst2", "bert:weights=no/where/", "there is no folder no/where/"),
        ("sst2", "bert:weights=nowhere/here", "no model of that name in the cache of Hugging Face"),
        ("sst2", "huggingface", "name a saved model: huggingface:weights=NAME"),
    ],
)
def test_what_does_not_fit_is_refused(root: Path, data: str, model: str, words: str) -> None:
    with pytest.raises(FedveilError, match=words) as told:
        fv.task(data, model=model, data_root=root)
    assert "\n" not in str(told.value)


def test_without_the_library_one_line_says_how_to_get_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FedveilError, match=r'text needs the package transformers: pip install "fedveil\[text\]"$'):
        make(root, BERT)


@pytest.mark.parametrize("model", [BERT, GPT2])
def test_weights_of_a_folder(root: Path, tmp_path: Path, model: str) -> None:
    trained = make(root, model)
    kind = model.partition(":")[0]
    spec = models.parse(kind)
    data = datasets.build(trained.name).load(root)
    vocabulary_of(data, spec.pieces, spec.entries).tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FedveilError, match=r"no config.json in"):
        make(root, f"{kind}:weights={tmp_path}", f":length=9,tokenizer={tmp_path}")
    trained.model.network.save_pretrained(tmp_path)
    loaded = make(root, f"{kind}:weights={tmp_path}", f":length=9,tokenizer={tmp_path}", seed=5)
    assert loaded.model_hash == trained.model_hash
    assert loaded.model.training
    alone = make(root, f"{kind}:weights={tmp_path}", ":length=9")  # with its own tokenizer
    assert (alone.model_hash, alone.data_hash) == (loaded.model_hash, loaded.data_hash)
    with pytest.raises(FedveilError, match="weights have their own sizes"):
        make(root, f"{model},weights={tmp_path}", f":length=9,tokenizer={tmp_path}")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(FedveilError, match="cannot read the weights in") as told:
        make(root, f"{kind}:weights={tmp_path}", f":length=9,tokenizer={tmp_path}")
    assert "\n" not in str(told.value)


# ---- under the data defenses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [BERT, GPT2])
@pytest.mark.parametrize(
    "spec",
    [
        "fedem:steps=3,radius=2,min_radius=1",
        "fedem:steps=3,radius=2,min_radius=1,norm=linf",
        "fedem:steps=3,radius=2,min_radius=1,step=relative",
        "fedcrap:steps=3,radius=2,min_radius=1",
    ],
)
def test_embeddings_are_perturbed_in_the_ring_and_padding_is_not(root: Path, model: str, spec: str) -> None:
    task = make(root, model)
    batch = client_batch(task, size=4)
    defense = defenses.parse(spec)
    moved = defense.perturb(batch)
    assert isinstance(moved, dict)
    real = moved["attention_mask"].bool()
    assert (~real).any() or model == GPT2
    assert not moved["offset"][~real].any()
    size = moved["offset"].flatten(2)
    length = size.abs().amax(-1) if "linf" in spec else size.norm(dim=-1)
    assert (length >= 1 - 1e-5).all()
    assert (length <= 2 + 1e-5).all()
    assert torch.equal(moved["input_ids"], batch.inputs["input_ids"])  # type: ignore[index, call-overload]


def test_fedem_lowers_the_loss_of_text(root: Path) -> None:
    batch = client_batch(make(root, BERT), size=4)
    moved = defenses.parse("fedem:steps=5,radius=2,step=relative,freeze=true").perturb(batch)
    assert (batch.loss(moved) < batch.loss()).all()


def test_fedbarre_leaves_padding_alone_and_starts_at_the_length_it_says(root: Path) -> None:
    batch = client_batch(make(root, BERT), size=4)
    defense = defenses.parse("fedbarre:models=1,high=2,pgd_steps=0")
    real = batch.inputs["attention_mask"].bool()  # type: ignore[index, call-overload]
    start = defense._perturbation(batch, batch.params, batch.streams)
    assert not start[~real].any()
    length = start.flatten(2).norm(dim=-1)
    assert 1.3 < float(length.mean()) <= 2 + 1e-5  # σ = u/√n of the tokens alone gives lengths of about u
    low = defenses.parse("fedbarre:models=1,low=1,high=2,sigma=0,pgd_steps=2")
    grown = low._perturbation(batch, batch.params, batch.streams)
    assert not grown[~real].any()
    assert (grown.flatten(2).norm(dim=-1) >= 1 - 1e-5).all()


@pytest.mark.parametrize(
    "spec",
    [
        "fedem:steps=3,radius=2,min_radius=1,per=token",
        "fedem:steps=3,radius=2,min_radius=1,per=token,step=relative",
        "fedcrap:steps=3,radius=2,min_radius=1,share=0.5,per=token",
        "fedbarre:models=1,low=1,high=2,per=token",
    ],
)
def test_every_token_can_have_a_radius_of_its_own(root: Path, spec: str) -> None:
    batch = client_batch(make(root, BERT), size=4)
    defense = defenses.parse(spec)
    if spec.startswith("fedbarre"):
        offset = defense._perturbation(batch, batch.params, batch.streams)
    else:
        offset = defense.perturb(batch)["offset"]
    real = batch.inputs["attention_mask"].bool()  # type: ignore[index, call-overload]
    length = offset.norm(dim=-1)
    assert (~real).any()
    assert not length[~real].any()
    assert (length[real] >= 1 - 1e-5).all()
    assert (length[real] <= 2 + 1e-5).all()
    assert (offset.flatten(2).norm(dim=-1) > 2).all()  # the whole sentence moves farther


def test_a_radius_for_each_token_is_for_text(root: Path) -> None:
    task = fv.task("digits", model="mlp", clients=2)
    with pytest.raises(FedveilError, match="per='token' is for text"):
        fv.federate(task, "fedem:per=token,steps=1", settings=FederationSettings(rounds=1))


def test_the_critical_share_is_one_of_tokens_not_of_padding() -> None:
    values = torch.randn(3, 4, 10, 6, generator=torch.Generator().manual_seed(0))
    among = torch.arange(10)[:, None] < torch.tensor([10, 5, 2, 0])[:, None, None]  # (4, 10, 1)
    among = among.expand(3, 4, 10, 1)
    mask = top_share(values, 0.25, among=among)
    assert mask.flatten(2).sum(-1).tolist() == [[15, 7, 3, 0]] * 3
    assert not (mask & ~among).any()
    taken = torch.where(mask, values.abs(), torch.inf).flatten(2).amin(-1)
    left = torch.where(mask | ~among, 0, values.abs()).flatten(2).amax(-1)
    assert (taken[:, :3] >= left[:, :3]).all()
    everything = torch.ones(3, 4, 10, 1, dtype=torch.bool)
    assert torch.equal(top_share(values, 0.25, among=everything), top_share(values, 0.25))


# ---- from the command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, model, defense",
    [("sst2:length=9", BERT, "fedem:radius=2,steps=2"), ("wikitext2:length=9", GPT2, "fedcrap:radius=5,steps=2")],
)
def test_text_trains_and_attacks_on_pictures_are_refused(
    fedveil: Any, root: Path, tmp_path: Path, data: str, model: str, defense: str
) -> None:
    chosen = ("--data", data, "--model", model, "--data-root", root, "--clients", "2", "--defense", defense)
    said = fedveil("train", *chosen, "--rounds", "2", "--record-rounds", "1", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    assert ("test perplexity" if model == GPT2 else "test accuracy") in said.out
    refused(
        fedveil("audit", *chosen, "--attack", "inverting-gradients", "--out", tmp_path / "audit"),
        "inverting-gradients attacks pictures or records, not sentences",
    )


def test_text_is_listed_and_checked(fedveil: Any, root: Path) -> None:
    said = fedveil("data", "list", "--data-root", root).out
    assert f"sst2             there     {root / 'sst2'}".split() in [line.split() for line in said.splitlines()]
    assert "sst2: sound: 24 + 6 + 6" in fedveil("data", "check", "sst2", "--data-root", root).out
