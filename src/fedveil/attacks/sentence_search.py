"""Putting sentences together from the tokens that may stand at each place, by how well they fit the deeper layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fedveil.attacks.sentence_fit import EXACT, SentenceFit
from fedveil.tasks.text_form import NO_TOKEN, TextForm

DRAWN = 64  # sentences that are drawn at first
CLIMBERS = 8  # of these, the ones that are improved
NOISY = 2  # the same under noise, where no sentence can fit exactly, and sweeps
SWEEPS = 6  # times that every token of a sentence may change
LENGTHS = 3  # of a noisy update, that are looked at
TRIES = 4  # times that all of this is done anew, where nothing fits
NEAR = 1e-5  # what is outside of the span by less is in it, in single precision
ENOUGH = 0.999  # of what the best sentence explains
BEAM = 32  # beginnings of sentences that are carried on, of a model that looks back alone

Options = Sequence[Sequence[int]]  # the tokens that may stand at each place, the likeliest first


@dataclass(frozen=True)
class Candidate:
    """A sentence, and how badly it fits."""

    tokens: tuple[int, ...]
    misfit: float

    @property
    def exact(self) -> bool:
        """Whether it fits but for rounding."""
        return self.misfit < EXACT


def laid_out(sentences: Sequence[Sequence[int]], places: int) -> Tensor:
    """Sentences as rows (N, places)."""
    made = torch.full((len(sentences), places), float(NO_TOKEN))
    for row, tokens in enumerate(sentences):
        made[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.float32)
    return made


def whole_sentences(fit: SentenceFit, options: Options, random: Generator) -> list[Candidate]:
    """Sentences of a model that looks both ways, of every length that may be, those first that fit best.

    Tokens are changed one at a time, each to the option with which the whole sentence fits best, from several starts.
    Special tokens stand at the ends alone. Stops at the first sentences that fit exactly.
    """
    found: dict[tuple[int, ...], float] = {}
    every = by_length(fit.layers.form, options)
    if not fit.clean:
        every = likely_lengths(fit, every)
    for attempt in range(TRIES):
        for choices in every:
            if attempt and all(len(choice) == 1 for choice in choices):
                continue
            for each in _climbed(fit, choices, random):
                found[each.tokens] = min(each.misfit, found.get(each.tokens, 1.0))
            if min(found.values()) < EXACT:
                return _sorted(found)
        if not fit.clean:  # no sentence will ever fit exactly
            break
    return _sorted(found)


def likely_lengths(fit: SentenceFit, every: list[list[list[int]]]) -> list[list[list[int]]]:
    """Of all lengths the few that explain most of a noisy update with the first option at each place."""
    firsts = [laid_out([[choice[0] for choice in choices]], len(choices))[0] for choices in every]
    explained = [fit.explained(each) for each in firsts]
    order = sorted(range(len(every)), key=lambda place: -explained[place])
    return [every[place] for place in order[:LENGTHS]]


def _sorted(found: dict[tuple[int, ...], float]) -> list[Candidate]:
    return sorted((Candidate(*each) for each in found.items()), key=lambda each: each.misfit)


def by_length(form: TextForm, options: Options) -> list[list[list[int]]]:
    """The options at the places of a sentence, for every length that it may have."""
    before, behind = form.ends
    found = []
    for length in range(len(before) + len(behind) + 1, len(options) + 1):
        ends = dict(enumerate(before))
        ends |= {length - len(behind) + place: token for place, token in enumerate(behind)}
        if any(token not in options[place] for place, token in ends.items()):
            continue
        choices = [
            [ends[place]] if place in ends else [each for each in options[place] if each not in form.special]
            for place in range(length)
        ]
        if all(choices):
            found.append(choices)
    return found


def _climbed(fit: SentenceFit, choices: Sequence[Sequence[int]], random: Generator) -> list[Candidate]:
    """Some sentences of one length after every token had its turn."""
    places = len(choices)
    drawn = {tuple(_drawn(choice, random) for choice in choices) for _ in range(DRAWN)}
    drawn.add(tuple(choice[0] for choice in choices))
    rows = laid_out(sorted(drawn), places)
    best = fit.misfit(rows).argsort()[: CLIMBERS if fit.clean else NOISY]
    rows = rows[best]
    misfit = fit.misfit(rows)
    free = [place for place, choice in enumerate(choices) if len(choice) > 1]
    for _ in range(SWEEPS if fit.clean else NOISY):
        before = misfit.clone()
        for place in [free[i] for i in torch.randperm(len(free), generator=random).tolist()]:
            options = torch.tensor(choices[place], dtype=torch.float32)
            tried = rows[:, None].repeat(1, len(options), 1)
            tried[:, :, place] = options
            misfits = fit.misfit(tried.flatten(0, 1)).view(len(rows), len(options))
            misfit, chosen = misfits.min(1)
            rows[:, place] = options[chosen]
        rows, kept = torch.unique(rows, dim=0, return_inverse=True)
        misfit = fit.misfit(rows)
        if float(misfit.min()) < 2 * EXACT or (len(kept) == len(rows) and bool((misfit >= before).all())):
            break
    exact = fit.misfit(rows, exact=True)
    return [Candidate(tuple(map(int, row.tolist())), float(one)) for row, one in zip(rows, exact, strict=True)]


def _drawn(choice: Sequence[int], random: Generator) -> int:
    return choice[int(torch.randint(len(choice), (1,), generator=random))]


def carried_on(fit: SentenceFit, options: Options) -> list[Candidate]:
    """Sentences of a model that looks back alone: every beginning is carried on by the token that fits best.

    What the layers are given at a place depends on the tokens up to it, so a beginning is judged by itself.
    """
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[Candidate] = []
    before: dict[tuple[int, ...], float] = {}  # the misfit up to the last token but one, which is never a mere target
    for place, choice in enumerate(options):
        if not choice:
            break
        grown = [((*tokens, token), total) for tokens, total in beam for token in choice]
        outside = fit.misfits(laid_out([tokens for tokens, _ in grown], place + 1))[:, place]
        before = {tokens: total / max(place, 1) for tokens, total in grown}
        judged = [(tokens, total + float(one)) for (tokens, total), one in zip(grown, outside, strict=True)]
        last = place + 1 == len(options)
        beam = sorted(judged, key=lambda each: (before[each[0]] if last else 0.0, each[1]))[:BEAM]
        done += [Candidate(tokens, total / (place + 1)) for tokens, total in beam]
    longest = max((len(each.tokens) for each in done), default=0)
    found = sorted((each for each in done if len(each.tokens) == longest), key=lambda each: each.misfit)
    near = [each for each in found if before[each.tokens] < NEAR]
    if len({each.tokens[:-1] for each in near}) < 2:
        return found
    # Without embeddings of places a token that is repeated lies in the span, too; but that explains little.
    explained = {each.tokens: fit.explained(laid_out([each.tokens], fit.layers.form.length)[0]) for each in near}
    most = max(explained.values())
    return [each for each in near if explained[each.tokens] >= ENOUGH * most]
