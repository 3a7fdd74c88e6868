"""Sentences: what is compared, in which order, and what one gets without an update."""

from __future__ import annotations

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor

import fedveil as fv
from attacks.texts import text_task
from fedveil.errors import FedveilError
from fedveil.leakage.modalities import modality_of
from fedveil.leakage.sentence_scores import likeness
from fedveil.leakage.sentences import Sentences
from fedveil.leakage.truths import Truths
from fedveil.tasks.text_form import NO_TOKEN, tokens_of


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> fv.Task:
    return text_task(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def kind(task: fv.Task) -> Sentences:
    made, said = modality_of(task).equipped(task, {})
    assert "rouge-score" in said[0]
    assert isinstance(made, Sentences)
    return made


def sentences(task: fv.Task, rows: list[int]) -> Tensor:
    return tokens_of(task.train.batch(rows)[0])


def scored(kind: Sentences, found: Tensor, true: Tensor, others: Tensor | None = None) -> dict[str, list[float]]:
    truths = Truths(true, torch.zeros(true.shape[:2]), true, (1,) * len(true), distractors=others)
    return {name: value.double().tolist() for name, value in kind.score(found, truths).values.items()}


def test_the_same_sentences_in_another_order_of_the_batch_are_whole(task: fv.Task, kind: Sentences) -> None:
    true = sentences(task, [0, 1])[None]
    others = sentences(task, [2, 3]).expand(2, 2, -1)
    got = scored(kind, true.flip(1), true, others)
    assert all(got[name] == [1, 1] for name in got if name != "diverged")
    assert got["diverged"] == [0, 0]


def test_rouge_is_that_of_the_library_and_order_counts(task: fv.Task, kind: Sentences) -> None:
    true = sentences(task, [0])
    size = int((true != NO_TOKEN).sum())
    turned = true.clone()
    turned[0, 1 : size - 1] = true[0, 1 : size - 1].flip(0)
    got = scored(kind, turned[None], true[None])
    said = RougeScorer(["rouge2", "rougeL"]).score(kind.form.text(true[0]), kind.form.text(turned[0]))
    assert got["rouge2"] == [said["rouge2"].fmeasure]
    assert got["rougeL"] == [said["rougeL"].fmeasure]
    assert got["tokens_found"] == [1]
    assert got["tokens_placed"][0] < 1
    assert got["whole_sentences"] == [0]


def test_a_token_that_is_none_is_flagged_and_counts_as_missing(task: fv.Task, kind: Sentences) -> None:
    true = sentences(task, [0, 1])[None]
    broken = true.clone()
    broken[0, 1, 2], broken[0, 0, 2] = torch.nan, 1e6
    got = scored(kind, broken, true)
    assert got["diverged"] == [1, 1]
    assert max(got["tokens_found"]) < 1


def test_a_tie_is_no_identification(task: fv.Task, kind: Sentences) -> None:
    true = sentences(task, [0])[None]
    nothing = torch.full_like(true, NO_TOKEN)
    assert scored(kind, nothing, true, sentences(task, [1]).expand(1, 1, -1))["identified"] == [0]
    assert scored(kind, true, true, sentences(task, [1]).expand(1, 1, -1))["identified"] == [1]


def test_likeness_counts_repeats_and_neighbors() -> None:
    assert likeness([1, 1, 2], [1, 2, 2]) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert likeness([], [1]) == 0


def test_the_floor_has_the_most_frequent_tokens_between_the_ends(task: fv.Task, kind: Sentences) -> None:
    floor = kind.floor(task.train)
    tokens = sentences(task, list(range(len(task.train))))
    inner = [int(each) for each in tokens.flatten() if each != NO_TOKEN and int(each) not in kind.form.special]
    counts = torch.bincount(torch.tensor(inner))
    assert counts[kind.form.content(floor)[0]] == counts.max()
    assert (int(floor[0]),) == kind.form.ends[0]
    assert abs(len(kind.form.content(floor)) - len(inner) / len(task.train)) <= 0.5


def test_distractors_are_of_the_same_length_first(task: fv.Task, kind: Sentences) -> None:
    own, pool = sentences(task, [0]), sentences(task, list(range(1, len(task.train))))
    chosen = kind.distractors(own, torch.zeros(1), (pool, torch.zeros(len(pool))), count=6, seed=0)
    sizes, mine = (pool != NO_TOKEN).sum(1), int((own != NO_TOKEN).sum())
    alike = int((sizes == mine).sum())
    assert alike >= 5
    assert sizes[chosen[0]].tolist() == [mine] * 5


def test_lpips_and_missing_libraries_are_refused(task: fv.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedveilError, match="is text: use lpips 'none'"):
        Sentences().check(task, {"lpips": "alex"})
    monkeypatch.setitem(__import__("sys").modules, "rouge_score", None)
    with pytest.raises(FedveilError, match=r'needs the package rouge-score: pip install "fedveil\[text\]"'):
        Sentences().check(task, {})
