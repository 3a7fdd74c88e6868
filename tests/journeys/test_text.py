"""Sentences from their file to their report."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedveil as fv
from attacks.texts import running_task, sentence_file, text_task
from fedveil.auditing.result import load_result
from fedveil.auditing.settings import AuditSettings
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.report.render import render

SETTINGS = AuditSettings(victims=2, candidates=8)


def test_sentences_come_back_and_the_report_marks_their_tokens(tmp_path: Path) -> None:
    task = text_task(tmp_path)
    found = fv.audit(task, suite="quick", settings=SETTINGS, train=False)
    row = found.result.row("ceiling", "token-rows")
    assert row is not None
    assert row.metrics["whole_sentences"].mean == 1
    assert found.result.text is not None
    linked = next(each for each in found.result.rows if each.question == "link" and each.role == "ceiling")
    assert linked.metrics["linked"].mean == 1
    page = render(found.result, found.images)
    assert '<mark class="right">' in page
    assert "most frequent words" in page
    assert "reads tokens off the embedding layer" in page
    assert "analytic" not in " ".join(found.result.not_tried)
    found.save(tmp_path / "kept")
    assert load_result(tmp_path / "kept")[0].text == found.result.text


@pytest.mark.parametrize(
    "defense", ["fedem:radius=2,steps=1", "dp-sgd:clip=1,noise_multiplier=0.001", "gradient-masking"]
)
def test_defended_sentences_are_attacked_by_all_roles(tmp_path: Path, defense: str) -> None:
    task = text_task(tmp_path)
    found = fv.audit(task, defense, attack=["token-rows", "token-span"], settings=SETTINGS, train=False)
    roles = {row.role for row in found.result.rows if row.attack == "token-rows"}
    assert {"ceiling", "naive", "noise-floor"} <= roles
    render(found.result, found.images)


def test_training_under_a_defense_and_attacking_a_later_round(tmp_path: Path) -> None:
    task = text_task(tmp_path, "tiny-transformer:width=32,embeddings=frozen")
    federation = FederationSettings(rounds=2, batch_size=8)
    settings = AuditSettings(victims=2, candidates=8, rounds=(2,))
    found = fv.audit(task, "clip", attack="token-span", federation=federation, settings=settings)
    assert found.result.row("naive", "token-span") is not None


def test_running_text_is_attacked(tmp_path: Path) -> None:
    found = fv.audit(running_task(tmp_path), attack="token-span", settings=SETTINGS, train=False)
    row = found.result.row("ceiling", "token-span")
    assert row is not None
    assert row.metrics["tokens_found"].mean > 0.8


def test_attacks_on_pictures_say_so(tmp_path: Path) -> None:
    with pytest.raises(FedveilError, match="ci-net attacks pictures, not sentences"):
        fv.audit(text_task(tmp_path), attack="ci-net", train=False)
    with pytest.raises(FedveilError, match="token-span attacks sentences, not pictures"):
        fv.audit(fv.task("digits", model="mlp", clients=2), attack="token-span", train=False)


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        ("good words\ta\n \tb\n", "", "line 2 has an empty sentence"),
        ("good words\ta\nbad words\n", "", "line 2 has 1 column"),
        ("good words\ta\n" * 9, "", "there must be two"),
        ("word " * 40 + "\ta\n" + "bad\tb\ngood\ta\n" * 9, ",length=16", "tokens, more than length=16"),
    ],
)
def test_bad_sentences_are_refused_in_one_line(tmp_path: Path, lines: str, more: str, said: str) -> None:
    (tmp_path / "own.tsv").write_text(lines, encoding="utf-8")
    with pytest.raises(FedveilError, match=said):
        fv.task(f"sentences:path={tmp_path / 'own.tsv'},vocabulary=300{more}", model="tiny-transformer", clients=2)


def test_other_encodings_missing_files_and_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.tsv").write_bytes("caf\xe9\ta\n".encode("latin-1"))
    with pytest.raises(FedveilError, match="line 1 is not UTF-8 text"):
        fv.task(f"sentences:path={tmp_path / 'latin.tsv'}", model="tiny-transformer")
    with pytest.raises(FedveilError, match="there is no file"):
        fv.task(f"sentences:path={tmp_path / 'none.tsv'}", model="tiny-transformer")
    with pytest.raises(FedveilError, match="name the file"):
        fv.task("sentences", model="tiny-transformer")
    with pytest.raises(FedveilError, match="takes at most 512 tokens"):
        fv.task(f"sentences:path={sentence_file(tmp_path)},length=600", model="tiny-transformer")
