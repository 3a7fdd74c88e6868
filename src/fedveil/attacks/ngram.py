"""An n-gram model: interpolated Kneser-Ney smoothing of pairs and triples of tokens (Chen and Goodman, 1999)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

DISCOUNT = 0.75  # taken off every count, for what was not seen
ORDER = 3  # tokens that are counted together
Context = tuple[int, ...]


class KneserNey:
    """How likely each token is behind the two before it.

    From the count of each triple that was seen a discount is taken off. What that makes free goes to the pairs, and
    from these to single tokens: there a token counts by how many others it follows, not by how often it occurs. The
    last share goes to all tokens alike. Each sentence has a beginning before it and an end behind it.
    """

    def __init__(self, triples: Mapping[Context, int], entries: int) -> None:
        self.begin, self.end = entries + 1, entries
        self.size = entries + 1  # what may follow: the tokens, and the end
        self.triples = dict(triples)
        # Counts of what follows each context; shorter contexts count in how many different longer ones it follows.
        self._follows: dict[Context, Counter[int]] = defaultdict(Counter)
        for (*before, token), count in self.triples.items():
            self._follows[tuple(before)][token] += count
        for order in range(ORDER - 1, 0, -1):
            longer = [context for context in self._follows if len(context) == order]
            for context in longer:
                for token in self._follows[context]:
                    self._follows[context[1:]][token] += 1
        self._totals = {context: sum(counts.values()) for context, counts in self._follows.items()}

    @classmethod
    def trained(cls, sentences: Iterable[Sequence[int]], entries: int) -> Self:
        """Of sentences of tokens below `entries`."""
        triples: Counter[Context] = Counter()
        for sentence in sentences:
            padded = [entries + 1] * (ORDER - 1) + list(sentence) + [entries]
            triples.update(tuple(padded[start : start + ORDER]) for start in range(len(padded) - ORDER + 1))
        return cls(triples, entries)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of it: the triples, and how often each was seen."""
        keys = sorted(self.triples)
        return {
            "triples": torch.tensor(keys, dtype=torch.int64).reshape(-1, ORDER),
            "counts": torch.tensor([self.triples[key] for key in keys], dtype=torch.int64),
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], entries: int) -> Self:
        """From what `tensors` gave."""
        pairs = zip(tensors["triples"].tolist(), tensors["counts"].tolist(), strict=True)
        return cls({tuple(key): count for key, count in pairs}, entries)

    def probability(self, token: int, context: Context) -> float:
        """Of a token (or the end) behind others, of which the last two count."""
        context = context[-(ORDER - 1) :] if context else ()
        shorter = self.probability(token, context[1:]) if context else 1 / self.size
        follows = self._follows.get(context)
        if follows is None:
            return shorter
        kept = max(follows[token] - DISCOUNT, 0.0) if token in follows else 0.0
        return (kept + DISCOUNT * len(follows) * shorter) / self._totals[context]

    def nats(self, sentence: Sequence[int]) -> float:
        """The mean negative log likelihood of a sentence's tokens and its end."""
        padded = [self.begin] * (ORDER - 1) + list(sentence) + [self.end]
        places = range(ORDER - 1, len(padded))
        each = [self.probability(padded[place], tuple(padded[place - ORDER + 1 : place])) for place in places]
        return -sum(map(math.log, each)) / len(each)
