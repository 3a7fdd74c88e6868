"""Any saved model of transformers: of which kinds, by which calls, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fedveil as fv
from attacks.texts import LENGTH, same_sentences, sentence_file, text_scene, text_task
from fedveil.attacks.token_rows import TokenRows
from fedveil.attacks.token_span import TokenSpan
from fedveil.clients.choose import why_not_stacked
from fedveil.errors import FedveilError
from journeys.console import fedveil, refused

__all__ = ["fedveil"]

SIZES = {
    "vocab_size": 400,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
ENCODERS = ("BertConfig", "MPNetConfig", "RobertaConfig", "ElectraConfig")
DECODERS = ("LlamaConfig", "GPTNeoXConfig")


def saved(folder: Path, kind: str, *, classes: bool, **more: Any) -> Path:
    """A fresh model of a kind with a tokenizer, as transformers saves them."""
    torch.manual_seed(0)
    made = getattr(transformers, kind)(**{**SIZES, "pad_token_id": 0, **more})
    auto = transformers.AutoModelForSequenceClassification if classes else transformers.AutoModelForCausalLM
    path = folder / kind
    model = auto.from_config(made)
    for parameter in model.parameters():
        parameter.data *= 3  # as large as those of a trained model: fresh ones attend to all tokens alike
    model.save_pretrained(path)
    text_task(folder).text.tokenizer.save(str(path / "tokenizer.json"))  # type: ignore[union-attr]
    return path


def loaded(folder: Path, kind: str, *, classes: bool, data: str = "", **more: Any) -> fv.Task:
    path = saved(folder, kind, classes=classes, **more)
    file = sentence_file(folder)
    name = f"sentences:path={file}" if classes else f"text:path={file}"
    return fv.task(f"{name},length={LENGTH}{data}", model=f"huggingface:weights={path}", clients=2)


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_scores_by_embeddings_are_those_by_tokens(tmp_path: Path, kind: str) -> None:
    task = loaded(tmp_path, kind, classes=kind in ENCODERS)
    inputs, _ = task.train.batch([0, 1, 2, 3])
    assert isinstance(inputs, dict)
    network = task.model.eval().network
    wanted = network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    assert torch.allclose(task.model(**inputs), wanted, atol=1e-4)
    assert not dict(task.model.named_buffers())
    assert why_not_stacked(task.model.train(), task.loss, task.train.batch([0, 1]), task.perturb) is None


@pytest.mark.parametrize("kind", ["MPNetConfig", "RobertaConfig"])
def test_places_that_are_counted_from_elsewhere_are_read_off_too(tmp_path: Path, kind: str) -> None:
    task = loaded(tmp_path, kind, classes=True)
    assert task.model.first_place == (2 if kind == "MPNetConfig" else 1)
    scene, true = text_scene(task, [[0], [1]])
    assert same_sentences(TokenRows().run(scene).inputs, true) == 1
    assert same_sentences(TokenSpan().run(scene).inputs, true) == 1


def test_a_llama_is_read_up_to_its_last_token(tmp_path: Path) -> None:
    scene, true = text_scene(loaded(tmp_path, "LlamaConfig", classes=False), [[0]])
    assert torch.equal(TokenSpan().run(scene).inputs[..., : LENGTH - 1], true[..., : LENGTH - 1])


def test_the_padding_token_is_the_tokenizers_own(tmp_path: Path) -> None:
    path = saved(tmp_path, "BertConfig", classes=True)
    task = fv.task(f"sentences:path={sentence_file(tmp_path)},length=16", model=f"huggingface:weights={path}")
    assert task.text is not None
    assert task.text.padding == task.text.tokenizer.token_to_id("[PAD]")
    renamed = json.loads((path / "tokenizer.json").read_text())
    renamed["model"]["vocab"]["<nothing>"] = renamed["model"]["vocab"].pop("[PAD]")
    renamed["added_tokens"] = [each for each in renamed["added_tokens"] if each["content"] != "[PAD]"]
    (path / "tokenizer.json").write_text(json.dumps(renamed))
    with pytest.raises(FedveilError, match="has no padding token, which fills short sentences"):
        fv.task(f"sentences:path={sentence_file(tmp_path)},length=16", model=f"huggingface:weights={path}")
    (path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<nothing>"}))
    fv.task(f"sentences:path={sentence_file(tmp_path)},length=16", model=f"huggingface:weights={path}")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("empty", "line 1 has an empty sentence: remove it"),
        ("encoding", "line 1 is not UTF-8 text"),
        ("long", "takes at most 40 tokens, not length=64"),
        ("refused", "more than length=4: use a greater length, or longer=cut"),
        ("foreign", "know 400 tokens, and the tokenizer has"),
        ("unknown", "the tokenizer is not one for this text"),
        ("padding", "has no padding token"),
        ("pickled", "cannot read the weights in"),
        ("without", "weights need the tokenizer they were made with, and there is none in"),
    ],
)
def test_what_does_not_fit_is_one_line_on_the_command_line(fedveil: Any, tmp_path: Path, case: str, said: str) -> None:
    path, file, length = saved(tmp_path, "BertConfig", classes=True), sentence_file(tmp_path), LENGTH
    tokens = json.loads((path / "tokenizer.json").read_text())
    if case == "empty":
        file.write_text(" \ta\n" + file.read_text())
    elif case == "encoding":
        file.write_bytes("caf\xe9\ta\n".encode("latin-1") + file.read_bytes())
    elif case in ("long", "refused"):
        length = {"long": 64, "refused": 4}[case]
    elif case == "foreign":
        tokens["model"]["vocab"] |= {f"more{number}": 1000 + number for number in range(400)}
    elif case == "unknown":
        tokens["model"]["vocab"] = {name: at for name, at in tokens["model"]["vocab"].items() if name != "[UNK]"}
        tokens["added_tokens"] = [each for each in tokens["added_tokens"] if each["content"] != "[UNK]"]
        file.write_text("\u4e00\u4e8c\ta\n" + file.read_text(), encoding="utf-8")
    elif case == "padding":
        tokens["model"]["vocab"]["none"] = tokens["model"]["vocab"].pop("[PAD]")
        tokens["added_tokens"] = [each for each in tokens["added_tokens"] if each["content"] != "[PAD]"]
    elif case == "pickled":
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
    (path / "tokenizer.json").write_text(json.dumps(tokens))
    if case == "without":
        (path / "tokenizer.json").unlink()
    data = f"sentences:path={file},length={length}"
    chosen = ("--data", data, "--model", f"huggingface:weights={path}", "--rounds", "1", "--out", tmp_path / "out")
    refused(fedveil("train", *chosen), said)


def test_a_saved_model_keeps_its_own_vocabulary(tmp_path: Path) -> None:
    path = saved(tmp_path, "BertConfig", classes=True)
    name = f"sentences:path={sentence_file(tmp_path)},length=16,vocabulary=300"
    with pytest.raises(FedveilError, match="a saved model has a vocabulary of its own: leave vocabulary out"):
        fv.task(name, model=f"huggingface:weights={path}")
