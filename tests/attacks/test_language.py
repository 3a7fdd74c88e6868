"""Language priors from elsewhere: any causal model of transformers, with a tokenizer of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from attacks.texts import text_scene, text_task
from fedveil.attacks.lab import Lab
from fedveil.attacks.lamp import LAMP
from fedveil.attacks.language import language_of
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.text_form import TextForm


def saved(folder: Path, begin: str | None = None) -> Path:
    """A fresh Llama in a folder, with a tokenizer that has, or has not, a token to begin a text with."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    made = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=300, **sizes))
    for parameter in made.parameters():
        parameter.data *= 20  # so that it has something to say
    path = folder / "causal"
    made.save_pretrained(path)
    form_of(folder).tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"bos_token": begin} if begin else {})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def form_of(folder: Path) -> TextForm:
    form = text_task(folder).text
    assert form is not None
    return form


@pytest.mark.parametrize("begin", [None, "[CLS]"])
def test_a_saved_model_reads_sentences_as_it_would_alone(tmp_path: Path, begin: str | None) -> None:
    """Each text by itself and without padding, by the library's own loss; behind a first token if there is one."""
    form, path = form_of(tmp_path), saved(tmp_path, begin)
    network = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    texts = ["the river sank today", "no one burned through the night at last", "a stone fell"]
    tokens = [form.tokenizer.encode(text).ids for text in texts]
    first = [] if begin is None else [form.tokenizer.token_to_id(begin)]
    wanted = []
    for own in tokens:
        ids = torch.tensor([[*first, *own[1:-1]]])  # without the ends that the task's sentences have
        wanted.append(network(input_ids=ids, labels=ids).loss)
    found = language_of(str(path), {}, form)
    assert found is not None
    laid_out = torch.stack([form.laid_out(own) for own in tokens])
    assert torch.allclose(found.nats(laid_out[:, None]), torch.stack(wanted), rtol=1e-4)
    assert torch.allclose(found.nats(laid_out[None]), torch.stack(wanted).mean(), rtol=1e-4)  # one batch of three


def test_what_is_no_language_model_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, path = form_of(tmp_path), saved(tmp_path)
    (path / "config.json").unlink()
    with pytest.raises(FedveilError, match=r"no causal language model in .*causal': it has no config.json"):
        language_of(str(path), {}, form)
    with pytest.raises(FedveilError, match=r"there is no file 'none\.gguf' of a causal language model"):
        language_of("none.gguf", {}, form)
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FedveilError, match="needs the package gguf: pip install gguf"):
        language_of(str(tmp_path / "one.gguf"), {}, form)


def test_damaged_files_are_refused_in_a_line(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(FedveilError, match=r"^no causal language model '.*': [^\n]+$"):
        language_of(str(path), {}, form_of(tmp_path))


def test_lines_of_a_file_make_an_n_gram_model(tmp_path: Path) -> None:
    """Its tokens are the task's own, and no line is cut at the length of the task's sentences."""
    task = text_task(tmp_path)
    form, corpus = form_of(tmp_path), tmp_path / "corpus.txt"
    lines = ["the river sank today", "a stone fell " * 20, "paper rose"]
    corpus.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    scene, _ = text_scene(task, [[0]])
    attack = LAMP(language=str(corpus))
    assert "auxiliary" not in attack.needs
    assert attack.brings == f"an n-gram model of the text {corpus}"
    fitted = attack.fit(Lab(scene.public, scene.updates, None, Streams.seeded(0, [0], "lab")))
    assert fitted is not None
    ids = [form.tokenizer.encode(line, add_special_tokens=False).ids for line in (lines[0], lines[2], "a stone fell")]
    seen = {tuple(row) for row in fitted["triples"].tolist()}
    assert all(tuple(own[at : at + 3]) in seen for own in ids for at in range(len(own) - 2))
    assert int(fitted["counts"].max()) >= 19
    language = language_of(str(corpus), fitted, form)
    assert language is not None
    own, other = (form.laid_out(form.tokenizer.encode(text).ids) for text in ("paper rose", "rose paper"))
    assert language.nats(own[None, None]) < language.nats(other[None, None])


def test_another_text_is_another_prior(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a stone fell\n", encoding="utf-8")
    before = LAMP(language=str(corpus)).learning
    corpus.write_text("a stone rose\n", encoding="utf-8")
    assert LAMP(language=str(corpus)).learning != before
    assert LAMP().learning == ["language", "n-gram"]


def test_a_text_in_a_wrong_encoding_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    scene, _ = text_scene(text_task(tmp_path), [[0]])
    with pytest.raises(FedveilError, match="line 1 is not UTF-8 text"):
        LAMP(language=str(tmp_path / "latin.txt")).check(scene)
