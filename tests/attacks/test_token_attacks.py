"""Sentences from gradients: by the span of the first attention layer, and by the rows of the embedding layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attacks.texts import LENGTH, running_task, same_sentences, text_scene, text_task
from fedveil.attacks.sentence_fit import SentenceFit
from fedveil.attacks.text_layers import TextLayers
from fedveil.attacks.token_rows import Tables, TokenRows
from fedveil.attacks.token_span import TokenSpan
from fedveil.errors import FedveilError
from fedveil.tasks.text_form import tokens_of

FROZEN = "tiny-transformer:width=64,embeddings=frozen"


@pytest.mark.parametrize("model", ["tiny-transformer:width=48", "tiny-transformer:width=48,embeddings=frozen"])
def test_the_span_gives_single_sentences_exactly(tmp_path: Path, model: str) -> None:
    scene, true = text_scene(text_task(tmp_path, model), [[0], [1], [2], [3]])
    found = TokenSpan().run(scene)
    assert same_sentences(found.inputs, true) == 1


def test_labels_of_single_sentences_are_read_off(tmp_path: Path) -> None:
    task = text_task(tmp_path)
    scene, _ = text_scene(task, [[0], [1], [2], [3]])
    assert TokenSpan().run(scene).labels.flatten().tolist() == task.train.labels[:4].tolist()


def test_the_span_takes_batches_apart_and_finds_their_labels(tmp_path: Path) -> None:
    task = text_task(tmp_path, FROZEN)
    scene, true = text_scene(task, [[0, 1, 2], [3, 4, 5]])
    found = TokenSpan().run(scene)
    assert same_sentences(found.inputs, true) == 1
    assert found.labels.sort(1).values.tolist() == task.train.labels[:6].view(2, 3).sort(1).values.tolist()


def test_bert_of_transformers_is_read_as_the_small_one(tmp_path: Path) -> None:
    task = text_task(tmp_path, "bert:width=48,layers=2,heads=2")
    for parameter in task.model.parameters():
        parameter.data *= 4  # as large as those of a trained model: fresh ones attend to all tokens alike
    scene, true = text_scene(task, [[0], [1]])
    groups = TextLayers(scene.public, scene.updates.before).groups
    assert [name.rpartition(".")[2] for name in groups[0].modules] == ["query", "key", "value"]
    assert same_sentences(TokenSpan().run(scene).inputs, true) == 1
    assert same_sentences(TokenRows().run(scene).inputs, true) == 1


def test_running_text_is_carried_on_from_its_beginning(tmp_path: Path) -> None:
    """All but the last token of each piece, which is a target alone and is given to no layer that has a gradient."""
    scene, true = text_scene(running_task(tmp_path), [[0], [1]])
    found = TokenSpan().run(scene)
    assert torch.equal(found.inputs[..., :9], true[..., :9])


def test_the_rows_of_the_embedding_layer_give_tokens_and_places(tmp_path: Path) -> None:
    scene, true = text_scene(text_task(tmp_path), [[0], [1], [2], [3]])
    assert same_sentences(TokenRows().run(scene).inputs, true) == 1


def test_rows_are_read_through_noise(tmp_path: Path) -> None:
    task = text_task(tmp_path, "tiny-transformer:width=48")
    scene, true = text_scene(task, [[0], [1], [2], [3]], noise=1e-4)
    assert same_sentences(TokenRows().run(scene).inputs, true) == 1


def test_rows_that_do_not_stand_out_of_the_noise_are_matched_to_places(tmp_path: Path) -> None:
    """A token's row and its place's row are two views of one gradient: they agree where each alone is lost in noise."""
    form = text_task(tmp_path).text
    assert form is not None
    (first,), (last,) = form.ends
    sentence, width, draw = [first, 40, 51, 62, 84, 73, last], 384, torch.Generator().manual_seed(0)
    rows = torch.randn(len(sentence), width, generator=draw, dtype=torch.float64)
    rows *= 10 / rows.norm(dim=1, keepdim=True)  # |row|² is 100, and that of noise strays by 28 about 384
    table = torch.randn(form.entries, width, generator=draw, dtype=torch.float64)
    places = torch.randn(form.length, width, generator=draw, dtype=torch.float64)
    for place, token in enumerate(sentence):
        table[token] += rows[place]
        places[place] += rows[place]
    tables = Tables("tokens", "places", form, 0)
    read = tables.read({"tokens": table, "places": places})
    assert not set(sentence) <= set(read.tokens)
    assert read.sentence() == tuple(sentence)


@pytest.mark.parametrize("decoys", [0.0, 0.05])
@pytest.mark.parametrize("length", [7, LENGTH])
def test_rows_of_which_only_some_entries_are_right_are_read(tmp_path: Path, decoys: float, length: int) -> None:
    """Four of ten entries are masked, or decoys, others in every row. Some tokens are there twice, one three times."""
    form = text_task(tmp_path).text
    assert form is not None
    (first,), (last,) = form.ends
    draw = torch.Generator().manual_seed(0)
    for inner in ([40, 51, 62, 84, 73], [40, 51, 40, 62, 51], [40, 40, 51, 40, 73]):
        sentence = [first, *inner, *range(90, 90 + length - 7), last]
        rows = 0.05 * torch.randn(len(sentence), 96, generator=draw, dtype=torch.float64)
        sent = {"places": torch.zeros(form.length, 96), "tokens": torch.zeros(form.entries, 96)}
        sent["places"][: len(sentence)] = rows.float()
        sent["tokens"].index_add_(0, torch.tensor(sentence), rows.float())
        for name, table in sent.items():
            kept = torch.rand(table.shape, generator=draw) > 0.4
            sent[name] = torch.where(kept, table / 0.6, decoys * torch.randn(table.shape, generator=draw))
        assert Tables("tokens", "places", form, 0).read(sent).sentence() == tuple(sentence)


def test_a_repeated_token_is_found_at_both_places_through_noise(tmp_path: Path) -> None:
    task = text_task(tmp_path, "tiny-transformer:width=192")
    rows = [tokens_of(task.train.batch([row])[0])[0] for row in range(len(task.train))]
    twice = [n for n, row in enumerate(rows) if len(set(row[row >= 0].tolist())) < int((row >= 0).sum())][:3]
    scene, true = text_scene(task, [[row] for row in twice], noise=1e-4)
    assert twice
    assert same_sentences(TokenRows().run(scene).inputs, true) == 1


def test_batches_are_read_off_rows_too(tmp_path: Path) -> None:
    scene, true = text_scene(text_task(tmp_path, "tiny-transformer:width=64"), [[0, 1, 2]])
    assert same_sentences(TokenRows().run(scene).inputs, true) == 1


def test_frozen_embeddings_have_no_rows_to_read(tmp_path: Path) -> None:
    scene, _ = text_scene(text_task(tmp_path, FROZEN), [[0]])
    with pytest.raises(FedveilError, match="frozen"):
        TokenRows().check(scene)
    TokenSpan().check(scene)


def test_noise_alone_gives_nothing(tmp_path: Path) -> None:
    scene, true = text_scene(text_task(tmp_path, FROZEN), [[0]])
    drawn = scene.updates.message.map(lambda tensor: torch.randn(tensor.shape, generator=torch.Generator()))
    found = TokenSpan().run(replace(scene, updates=replace(scene.updates, message=drawn)))
    assert same_sentences(found.inputs, true) == 0


def test_several_local_steps_are_refused(tmp_path: Path) -> None:
    scene, _ = text_scene(text_task(tmp_path), [[0, 1]])
    several = replace(scene.updates, kind="delta", lr=(0.1, 0.1), batch_sizes=(1, 1))
    for attack in (TokenSpan(), TokenRows()):
        with pytest.raises(FedveilError, match="several local steps"):
            attack.check(replace(scene, updates=several))


def test_a_wrong_sentence_does_not_fit(tmp_path: Path) -> None:
    scene, true = text_scene(text_task(tmp_path, FROZEN), [[0]])
    fit = SentenceFit.of(TextLayers(scene.public, scene.updates.before), scene.updates.message.row(0))
    wrong = true[0].clone()
    wrong[0, [1, 2]] = wrong[0, [2, 1]]
    assert float(fit.misfit(true[0], exact=True)) < 1e-9
    assert float(fit.misfit(wrong, exact=True)) > 1e-4
