"""All metrics of reconstructed sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedveil.leakage.modality import Scores
from fedveil.leakage.sentences import Sentences
from fedveil.leakage.truths import Truths
from fedveil.tasks.examples import Examples
from fedveil.tasks.text_form import NO_TOKEN, TextForm, tokens_of
from fedveil.tasks.vocabulary import text_library

ROUGE = ("rouge1", "rouge2", "rougeL")


def score(sentences: Sentences, inputs: Tensor, truths: Truths) -> Scores:
    """Every metric of V victims' reconstructions (V, B, places), in the order of the originals.

    A token that is none (not finite, or not in the vocabulary) counts as nothing, and its sentence as `diverged`.
    """
    form = sentences.form
    wrong = ~torch.isfinite(inputs) | (inputs < NO_TOKEN) | (inputs >= form.entries)
    clean = inputs.float().masked_fill(wrong, NO_TOKEN)
    found, order = arranged(form, clean, truths.originals)
    victims = torch.arange(len(order)).unsqueeze(1)
    flat, true = found.flatten(0, 1), truths.originals.flatten(0, 1)
    values = compared(form, flat, true)
    if truths.distractors is not None:
        values["identified"] = _identified(form, flat, true, truths.distractors)
    values["diverged"] = wrong.any(-1)[victims, order].flatten()
    return Scores(values, sentences.exhibit(flat))


def compared(form: TextForm, found: Tensor, true: Tensor) -> dict[str, Tensor]:
    """What tells reconstructions (N, places) from their originals."""
    scorer = text_library("rouge_score.rouge_scorer").RougeScorer(ROUGE)
    values: dict[str, list[float]] = {name: [] for name in ("whole_sentences", *ROUGE, "tokens_found", "tokens_placed")}
    for one, other in zip(found, true, strict=True):
        mine, theirs = form.content(one), form.content(other)
        values["whole_sentences"].append(mine == theirs)
        rouge = scorer.score(form.text(other), form.text(one))
        for name in ROUGE:
            # Sentences without a single letter have no words for it: then their tokens decide.
            values[name].append(rouge[name].fmeasure if _has_words(form.text(other)) else float(mine == theirs))
        common = sum((Counter(mine) & Counter(theirs)).values())
        values["tokens_found"].append(common / max(len(theirs), 1))
        hits = sum(a == b for a, b in zip(mine, theirs, strict=False))
        values["tokens_placed"].append(hits / max(len(theirs), 1))
    kinds = {"whole_sentences": torch.bool}
    return {name: torch.tensor(listed, dtype=kinds.get(name, torch.float64)) for name, listed in values.items()}


def _has_words(text: str) -> bool:
    return any(letter.isascii() and letter.isalnum() for letter in text)


def likeness(one: Sequence[int], other: Sequence[int]) -> float:
    """How alike two lists of tokens are: half by the tokens and half by the pairs of neighbors that they share.

    >>> likeness([1, 2, 3], [1, 2, 3]), likeness([1, 2, 3], [3, 1, 2]), likeness([1, 2], [3, 4])
    (1.0, 0.75, 0.0)
    """

    def shared(a: Counter[object], b: Counter[object]) -> float:
        total = sum(a.values()) + sum(b.values())
        return 2 * sum((a & b).values()) / total if total else 0.0

    if max(len(one), len(other)) < 2:  # no neighbors
        return shared(Counter(one), Counter(other))
    pairs = (Counter[object](pairwise(each)) for each in (one, other))
    return (shared(Counter(one), Counter(other)) + shared(*pairs)) / 2


def arranged(form: TextForm, found: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """The reconstructions of every batch in the order of the originals that they are most like, and that order."""
    orders = []
    for mine, theirs in zip(found, true, strict=True):
        ours, originals = [form.content(each) for each in mine], [form.content(each) for each in theirs]
        alike = [[likeness(original, each) for each in ours] for original in originals]
        orders.append(torch.from_numpy(linear_sum_assignment(alike, maximize=True)[1]))
    order = torch.stack(orders)
    return torch.stack([mine[own] for mine, own in zip(found, order, strict=True)]), order


def _identified(form: TextForm, found: Tensor, true: Tensor, distractors: Tensor) -> Tensor:
    """Whether each reconstruction is more like its original than like any of its distractors; a tie is a no."""
    verdicts = []
    for mine, own, others in zip(found, true, distractors, strict=True):
        got = form.content(mine)
        near = likeness(got, form.content(own))
        verdicts.append(all(near > likeness(got, form.content(other)) for other in others))
    return torch.tensor(verdicts, dtype=torch.bool)


def lengths(tokens: Tensor) -> Tensor:
    """The tokens of each sentence (N, places) that are there."""
    return (tokens != NO_TOKEN).sum(-1).float()


def most_frequent(train: Examples) -> Tensor:
    """A sentence of the most frequent tokens, the most frequent first, as long as the mean of all: shape (places,)."""
    form = train.text
    assert form is not None  # `check` admits text only
    counts, total = torch.zeros(form.entries, dtype=torch.int64), 0
    for inputs, _ in train.batches(4096):
        tokens = tokens_of(inputs)
        there = tokens[tokens != NO_TOKEN].long()
        counts += torch.bincount(there, minlength=form.entries)
    counts[sorted(form.special)] = 0
    total = int(counts.sum())
    size = min(max(round(total / len(train)), 1), form.length)
    chosen = counts.argsort(descending=True, stable=True)[:size].tolist()
    before, behind = form.ends
    return form.laid_out([*before, *chosen[: form.length - len(before) - len(behind)], *behind])
