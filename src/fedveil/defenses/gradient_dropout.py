"""Gradient Dropout (Sotthiwat et al.): keep a random part of every gradient, replace the rest by decoys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, Strength, once_as_sent
from fedveil.defenses.densities import Pair, either, log_normal_density, root_mean_square, summed
from fedveil.defenses.guarantee import Exposure, Guarantee
from fedveil.fields import KeepProbability, NonNegative, declared
from fedveil.registry import defenses
from fedveil.tree import Tree, at_least_single, matrix, per_client

_FITTED = 10_000  # entries of a tensor that its distribution is fitted to: more would not change the fit
_TINY = 1e-200  # keeps logarithms of variances finite


_MEDIAN = 0.6745  # of |N(0, 1)|
_ROUNDING = 4  # of the smallest steps between numbers: by how much values may differ that are one
DOUBT = 0.01  # the share of decoys among entries that look certain: bounds their weight


@defenses.register("gradient-dropout")
@declared
class GradientDropout(Defense):
    """Keep each entry with probability `keep`, scaled by 1/keep; draw the others from N(0, sigma²).

    Unbiased, and no formal privacy: an attacker who knows `sigma` can often tell decoys from gradients (see
    `knowledge`). Under FedAvg it acts on each local step's gradient; `at="upload"` acts once on the update.
    """

    paper = "Sotthiwat et al., Safeguarding Federated Learning from Data Reconstruction Attacks via Gradient Dropout"
    weaknesses = (
        "Kept entries go out exactly, times a known factor.",
        "Decoys of one spread stand out in layers whose gradients have another: see match_spread.",
        "The error of each entry that the paper bounds from below (Theorem 1) is no privacy: 2g has it too.",
    )
    strength = Strength("keep", "down", weak=0.95, strong=0.1, steps="even")
    keep: KeepProbability = 0.8  # p in the paper: probability that an entry is kept
    sigma: NonNegative = 5e-3  # σ in the paper: standard deviation of the decoys
    match_spread: bool = False  # decoys with each layer's own spread in place of sigma (what Fig. 9 aims at)
    at: Literal["gradient", "upload"] = "gradient"  # the gradient of every step, or once what is uploaded

    def protect(self, update: Tree, call: Call) -> Tree:
        """Algorithm 1: every layer, every entry, fresh each time."""

        def drop(g: Tensor) -> Tensor:
            kept, decoys = call.streams.chance_like(g, self.keep), call.streams.normal_like(g)
            # The same as `torch.where` and faster, except that NaN and infinity always become NaN: a decoy in their
            # place would hide a broken gradient from the server. Adding 0 makes zeros positive: where decoys are
            # zero, −0.0 would give the sign of the entry away.
            return decoys.mul_(self._spread(g)).lerp_(g / self.keep, kept).add_(0.0)

        if not self.match_spread:
            return update.entrywise(drop)
        return update.map(lambda g: drop(at_least_single(g)).to(g.dtype))

    def _spread(self, g: Tensor) -> Tensor | float:
        if not self.match_spread:
            return self.sigma
        return per_client(matrix(g).square().mean(1).sqrt(), g)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """None."""
        return Guarantee("Formal guarantee: none; Gradient Dropout is not differentially private.")

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """Entries rescaled by `keep`, trusted by the posterior q that they were kept.

        A kept entry comes from its tensor's own distribution, fitted as a mixture of centered Gaussians; a decoy
        from N(0, sigma²). A kept entry is exact and a decoy says nothing, so the error of an entry is proportional
        to 1 − q, and its weight to the inverse of that: DOUBT/(1 − q + DOUBT). Weighting by q itself lets the many
        doubtful entries outweigh the sure ones: 2 to 4 dB less on MNIST.
        """

        def trust(tensor: Tensor) -> Tensor:
            dropped = 1 - self._posterior(matrix(tensor)).reshape(tensor.shape)
            return DOUBT / (dropped + DOUBT)

        again = self.reweight if self.keep < 1 else None
        return Knowledge(target=observed * self.keep, weight=observed.map(trust), reweight=again)

    def reweight(self, target: Tree, made: Tree) -> Tree:
        """P(kept) of every entry, given what a candidate would have sent: entries that agree with it were kept.

        A kept entry differs from the candidate's by the candidate's own error, N(0, s²) with one s for each tensor; a
        decoy is N(0, sigma²). At least keep/2 of the entries are kept and agree better than the others, so s is read
        off that quantile of the differences.
        """

        def trust(aim: Tensor, own: Tensor) -> Tensor:
            return torch.sigmoid(self._log_odds(aim, own)).reshape(aim.shape).to(aim.dtype)

        return target.combine(made, trust)

    def _log_odds(self, aim: Tensor, own: Tensor) -> Tensor:
        """The log odds that every entry of one tensor was kept, given a candidate's own: shape (K, n)."""
        values, off = matrix(aim).double() / self.keep, (matrix(aim) - matrix(own)).double().abs()
        spread = root_mean_square(matrix(own).double()) if self.match_spread else off.new_tensor([[self.sigma]])
        # The median of |N(0, 1)| is 0.6745.
        error = (_quantile(off, self.keep / 2) / _MEDIAN).clamp_min(torch.finfo(aim.dtype).tiny)
        kept = math.log(self.keep) + log_normal_density(off, error) + math.log(self.keep)
        decoy = math.log1p(-self.keep) + log_normal_density(values, spread.clamp_min(_TINY))
        return kept - decoy

    def together(self, views: Sequence[Knowledge], facts: Facts) -> Knowledge:
        """Entries that agree in two messages were kept; where none do, at most one was, chosen by its posterior.

        Decoys are drawn anew and hardly ever agree. Under local steps, or behind other defenses, kept entries need not
        agree either: then every message is weighed by itself.
        """
        if self.keep == 1 or not once_as_sent(self, views, facts):
            return super().together(views, facts)
        sent = tuple(each.target for each in views)

        def odds(name: str) -> Tensor:
            posterior = torch.stack([self._posterior(matrix(view[name])) for view in sent]).double()
            return torch.logit(posterior, eps=1e-12)

        target, kept = self._joined(sent, odds)
        return Knowledge(
            target=target * self.keep,
            weight=kept.map(lambda tensor: DOUBT / (1 - tensor + DOUBT)),
            reweight=self.reweight,
            views=tuple(view * self.keep for view in sent),
            rejoin=self.rejoin,
        )

    def rejoin(self, views: Sequence[Tree], made: Tree) -> tuple[Tree, Tree]:
        """What messages about one batch say together, given what a candidate would have sent, and P(kept) of that."""
        return self._joined(views, lambda name: torch.stack([self._log_odds(view[name], made[name]) for view in views]))

    def _joined(self, views: Sequence[Tree], odds: Callable[[str], Tensor]) -> tuple[Tree, Tree]:
        """Of every entry the value that was most likely kept, and P(kept) of it.

        odds: of a tensor, the log odds (views, K, n) that each value was kept, looked at alone. That none was kept, or
        the one of view k alone, has the odds 1 : o₁ : o₂ : … among each other.
        """
        target, kept = {}, {}
        silent = self.sigma == 0 and not self.match_spread  # decoys are zeros, which agree too
        for name, like in views[0].items():
            values, log_odds = torch.stack([matrix(view[name]) for view in views]), odds(name)
            total = torch.logaddexp(torch.logsumexp(log_odds, 0), torch.zeros_like(log_odds[0]))
            best, place = log_odds.max(0)
            alone = values.gather(0, place[None])[0]
            agreed, times = most_agreed(values, zeros=not silent)
            chance = torch.where(times > 1, 1.0, torch.exp(best - total))
            if silent:
                chance = torch.where((values == 0).all(0), _truly_zero(values, self.keep), chance)
            target[name] = torch.where(times > 1, agreed, alone).reshape(like.shape)
            kept[name] = chance.reshape(like.shape).to(like.dtype)
        return Tree(target), Tree(kept)

    def _posterior(self, values: Tensor) -> Tensor:
        """P(kept | value) for every entry of one tensor of each client: shape (K, n)."""
        spread = values.double().square().mean(1, keepdim=True)
        if self.match_spread:
            # E[value²] = s²/keep + (1 − keep)·s² with s the gradient's own spread, which the decoys share.
            decoy = spread / (1 / self.keep + 1 - self.keep)
        else:
            decoy = torch.full_like(spread, self.sigma**2)
        return kept_posterior(values, self.keep, decoy)

    def measures(self, update: Tree) -> dict[str, float]:
        """The exact effects on a true gradient, mean over clients.

        Expected squared error per entry (1−p)/p·g² + (1−p)σ², and the cosine 1/√(1/p + (1−p)σ²d/‖g‖²) ≤ √p that
        Theorem 4 leads to. The added variance of a model update is the learning rate squared times the error.
        """
        p = self.keep
        squares = torch.stack([matrix(g).square().sum(1) for g in update.values()])  # (tensors, K)
        decoys = torch.stack([g[0].numel() * self._variance(g) for g in update.values()])  # Σ σ² over entries
        total, noise = squares.sum(0), (1 - p) * decoys.sum(0)
        error = (1 - p) / p * total + noise
        cosine = (1 / p + noise / total.clamp_min(1e-30)).rsqrt()
        return {
            "expected squared error per entry": float((error / update.size).mean()),
            "expected squared error of an update before the learning rate": float(error.mean()),
            "predicted cosine to the true gradient": float(cosine.mean()),
            "largest cosine this keep allows (√p)": p**0.5,
        }

    def _variance(self, g: Tensor) -> Tensor:
        spread = self._spread(g)
        return spread.flatten().square() if isinstance(spread, Tensor) else g.new_full((len(g),), spread**2)

    @property
    def random(self) -> bool:
        """Unless every entry is kept."""
        return self.keep < 1

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """A mixture: g/keep exactly, or a decoy. Where decoys are silent, every entry that is not zero was kept."""

        def law(pair: Pair) -> Tensor:
            kept = math.log(self.keep) + pair.spike(pair.given / self.keep)
            fixed = pair.given.new_full((1, 1), self.sigma)
            spread = root_mean_square(pair.given) if self.match_spread else fixed
            decoy = math.log1p(-self.keep) + log_normal_density(pair.sent, spread.clamp_min(_TINY))
            zero = either(pair.given == 0, 0.0, math.log1p(-self.keep))
            silent = torch.where(pair.sent == 0, zero, kept)
            return torch.where(spread > 0, torch.logaddexp(kept, decoy), silent)

        return summed(observed, given, law)


def kept_posterior(values: Tensor, keep: float, decoy: Tensor, components: int = 16, rounds: int = 100) -> Tensor:
    """P(kept) of every value (K, n): a mixture of centered Gaussians against decoys of a known variance (K, 1).

    Gradients within one tensor are heavy-tailed, so one Gaussian fits them badly. The share of decoys, 1 − keep, is
    known. The variances of the gradient's components stand on a fixed grid, so that fitting their shares by
    expectation-maximization has one solution. Entries that are exactly zero are counted instead: a decoy is zero
    only where its variance is.
    """
    if keep == 1:
        return torch.ones_like(values)
    square, decoy = values.double().square(), decoy.double()
    zero, silent = values == 0, decoy == 0
    zeros = zero.double().mean(1, keepdim=True)
    # The decoys are among the zeros if they are silent, else among the others.
    of_zeros = torch.where(silent, 1 - (1 - keep) / zeros.clamp_min(1e-30), 1.0).clamp(0, 1)
    prior = (1 - (1 - keep) / (1 - zeros).clamp_min(1e-30)).clamp(1e-6, 1 - 1e-6)

    spread = square.mean(1, keepdim=True).clamp_min(_TINY)
    decoy = torch.where(silent, spread, decoy)  # not used where silent, but must be a variance
    low, high = torch.minimum(spread, decoy).log() - 9, torch.maximum(spread, decoy).log() + 2
    variance = torch.lerp(low, high, torch.linspace(0, 1, components, dtype=low.dtype, device=low.device)).exp()
    share = _fit_shares(torch.where(zero, torch.nan, square), prior, decoy, variance, rounds)
    kept = torch.full_like(square, -torch.inf)
    for part, width in zip(share.T[..., None], variance.T[..., None], strict=True):  # one by one, to save memory
        kept = torch.logaddexp(kept, torch.log(part) + log_normal(square, width))
    posterior = torch.sigmoid(torch.logit(prior) + kept - log_normal(square, decoy))
    return torch.where(zero, of_zeros, torch.where(silent, 1.0, posterior)).to(values.dtype)


def most_agreed(values: Tensor, *, zeros: bool = True) -> tuple[Tensor, Tensor]:
    """Of values (views, K, n) of every entry the one that occurs most often but for rounding, and how often: (K, n).

    zeros: whether these count as values.
    """
    ordered = values.sort(0).values
    best, times = ordered[0], torch.ones_like(ordered[0], dtype=torch.int64)
    length = times
    for before, value in pairwise(ordered):
        alike = (value - before) <= _ROUNDING * torch.finfo(values.dtype).eps * value.abs()
        if not zeros:
            alike = alike & (value != 0)
        length = torch.where(alike, length + 1, 1)
        best, times = torch.where(length > times, value, best), torch.maximum(times, length)
    return best, times


def _truly_zero(values: Tensor, keep: float) -> Tensor:
    """P(zero itself) of an entry that is zero in all views (views, K, n), where decoys are silent: shape (K, 1)."""
    never = (1 - keep) ** len(values)  # kept in no view
    zeros = (values == 0).all(0).double().mean(1, keepdim=True)
    replaced = (1 - zeros) * never / (1 - never)
    return (1 - replaced / zeros.clamp_min(1e-30)).clamp(0, 1)


def _fit_shares(square: Tensor, prior: Tensor, decoy: Tensor, variance: Tensor, rounds: int) -> Tensor:
    """The shares (K, components) of the variances among kept entries, from at most 10,000 entries; NaN is left out."""
    length = square.shape[1]
    some = square[:, torch.randperm(length, generator=torch.Generator().manual_seed(0))[:_FITTED].to(square.device)]
    used = ~some.isnan()
    some = some.nan_to_num(0.0)
    log_kept, log_decoy = log_normal(some[..., None], variance[:, None]), log_normal(some, decoy)
    top = torch.maximum(log_kept.amax(-1), log_decoy)
    kept = prior[..., None] * torch.exp(log_kept - top[..., None])  # (K, n, components)
    dropped = (1 - prior) * torch.exp(log_decoy - top)
    components = variance.shape[1]
    share = torch.full_like(variance, 1 / components)
    for _ in range(rounds):
        duty = kept * share[:, None]
        duty = duty / (duty.sum(-1) + dropped)[..., None] * used[..., None]
        # One entry's worth of doubt, spread over the grid: a handful of entries must not fit themselves exactly.
        mass = duty.sum(1) + 1 / components
        share = mass / mass.sum(1, keepdim=True)
    return share


def _quantile(values: Tensor, share: float) -> Tensor:
    """The `share` quantile of every row (K, n), shape (K, 1): torch's own takes no more than 16 million entries."""
    place = min(int(share * values.shape[1]), values.shape[1] - 1)
    return values.kthvalue(place + 1, dim=1, keepdim=True).values


def log_normal(square: Tensor, variance: Tensor) -> Tensor:
    """The log density of N(0, variance) at a value whose square is given, without the constant."""
    return -0.5 * (square / variance + torch.log(variance))
