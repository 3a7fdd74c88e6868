"""From reconstructions to the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.problem import Reconstruction
from fedveil.auditing.result import Estimate, Images, Role, Row, Trace
from fedveil.leakage.assignment import assign, reorder
from fedveil.leakage.catalog import METRICS
from fedveil.leakage.intervals import Interval, bootstrap
from fedveil.leakage.metrics import ssim, to_pixels
from fedveil.leakage.score import Classifier, gray_gaps, score
from fedveil.tasks.normalization import Normalization

MARKS = ("1/3", "2/3", "all")  # of the attack's steps, where SSIM is noted too


@dataclass(frozen=True)
class Truths:
    """What the victims really had: for scoring only."""

    originals: Tensor  # (V, B, C, H, W) normalized
    labels: Tensor  # (V, B)
    seen: Tensor  # (V, B, C, H, W): what the gradient was taken at
    distractors: Tensor  # (V·B, M, C, H, W)
    mean_image: Tensor  # (C, H, W)
    normalization: Normalization
    rounds: tuple[int, ...]  # V: the attacked round of each victim
    reference: Classifier | None = None  # adds the metrics that compare what pictures show
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def groups(self) -> list[int]:
        """The victim of every image: images of one batch depend on each other."""
        victims, size = self.originals.shape[:2]
        return torch.arange(victims).repeat_interleave(size).tolist()


@dataclass(frozen=True)
class Scored:
    """A scored attack: its rows, pictures, traces and the SSIM on the way."""

    rows: list[Row]
    traces: list[Trace]
    ssim_at: dict[Role, dict[str, Estimate]]
    label_recovery: Estimate | None


def estimate(interval: Interval) -> Estimate:
    """An interval as the result document keeps it."""
    return Estimate(mean=interval.mean, low=interval.low, high=interval.high, count=interval.count)


def score_attack(
    attack: str, found: Mapping[Role, Reconstruction], truths: Truths, images: Images, *, labels_known: bool
) -> Scored:
    """Score every role of one attack. Reconstructions are assigned to originals within each batch first."""
    found = {role: _in_single(outcome) for role, outcome in found.items()}
    arranged = {role: _arrange(outcome, truths) for role, outcome in found.items()}
    prior = _prior_ssim(arranged["noise-floor"][0], truths)
    rows, traces, on_the_way = [], [], {}
    for role, outcome in found.items():
        pictures, iterates = arranged[role]
        size = truths.originals.shape[1]
        cost = outcome.cost.repeat_interleave(size)
        values = _values(pictures, truths, iterates=iterates, attack_loss=cost, prior_ssim=prior)
        rows.append(make_row(attack, role, values, truths.groups))
        traces.append(_trace(attack, role, outcome))
        on_the_way[role] = _ssim_at(iterates, truths)
        images.reconstructions[(attack, role)] = _pictures(pictures, truths.normalization)
    recovered = None
    if not labels_known and "ceiling" in found:
        recovered = _label_recovery(found["ceiling"].labels, truths)
    return Scored(rows, traces, on_the_way, recovered)


def score_given(role: Role, inputs: Tensor, truths: Truths, images: Images) -> Row:
    """Score pictures that no attack made: the mean image, or the inputs that a perfect inversion would yield."""
    pictures = inputs.expand_as(truths.originals).flatten(0, 1)
    prior = _prior_ssim(pictures, truths) if role == "mean-floor" else None
    values = _values(pictures, truths, prior_ssim=prior)
    images.reconstructions[("", role)] = _pictures(pictures, truths.normalization)
    return make_row("", role, values, truths.groups)


def _values(pictures: Tensor, truths: Truths, **more: Any) -> dict[str, Tensor]:
    """Every metric of pictures that stand in the order of the originals."""
    return score(
        pictures,
        truths.originals.flatten(0, 1),
        truths.normalization.mean,
        truths.normalization.std,
        truths.distractors,
        reference=truths.reference,
        lpips=truths.lpips,
        **more,
    )


def make_row(attack: str, role: Role, values: Mapping[str, Tensor], groups: list[int]) -> Row:
    """A row from one value per image and metric. That nothing diverged goes without saying."""
    values = {name: value for name, value in values.items() if name != "diverged" or bool(value.any())}
    metrics = {
        name: estimate(bootstrap(value.numpy(), groups=groups, share=METRICS[name].share))
        for name, value in values.items()
    }
    listed = {name: [float(v) for v in value] for name, value in values.items()}
    return Row(attack=attack, role=role, metrics=metrics, values=listed)


def rows_by_round(rows: list[Row], truths: Truths) -> list[Row]:
    """The rows again for each attacked round alone, where several were attacked: they may leak very differently."""
    numbers = list(dict.fromkeys(truths.rounds))
    of_image = torch.tensor([truths.rounds[victim] for victim in truths.groups])
    found = []
    for number in numbers if len(numbers) > 1 else []:
        mine = of_image == number
        groups = [group for group, chosen in zip(truths.groups, mine.tolist(), strict=True) if chosen]
        for row in rows:
            values = {name: torch.tensor(listed, dtype=torch.float64)[mine] for name, listed in row.values.items()}
            found.append(make_row(row.attack, row.role, values, groups).model_copy(update={"round": number}))
    return found


def _in_single(outcome: Reconstruction) -> Reconstruction:
    """The outcome in single precision, whatever the attacked model's own type is."""
    return replace(
        outcome,
        inputs=outcome.inputs.float(),
        iterates=outcome.iterates.float(),
        cost=outcome.cost.float(),
        costs=outcome.costs.float(),
    )


def _arrange(outcome: Reconstruction, truths: Truths) -> tuple[Tensor, list[Tensor]]:
    """The pictures and the iterates, flat over batches, in the order of the originals."""
    pictures, order = assign(outcome.inputs, truths.originals)
    return pictures.flatten(0, 1), [reorder(iterate, order).flatten(0, 1) for iterate in outcome.iterates]


def _prior_ssim(noise_floor: Tensor, truths: Truths) -> Tensor:
    """The SSIM of the better floor for every image: what an attacker has without the update."""
    originals = truths.originals.flatten(0, 1)
    mean = _ssim(truths.mean_image.expand_as(originals), originals, truths.normalization)
    noise = _ssim(noise_floor, originals, truths.normalization)
    return noise if float(noise.mean()) > float(mean.mean()) else mean


def _ssim(images: Tensor, originals: Tensor, normalization: Normalization) -> Tensor:
    mean, std = normalization.mean, normalization.std
    pixels = to_pixels(gray_gaps(images, mean, std), mean, std).clamp(0, 1)
    return ssim(pixels, to_pixels(originals, mean, std).clamp(0, 1))


def _ssim_at(iterates: list[Tensor], truths: Truths) -> dict[str, Estimate]:
    """SSIM after a third, two thirds and all of the steps."""
    places = [max(round(len(iterates) * part / 3) - 1, 0) for part in (1, 2, 3)]
    originals = truths.originals.flatten(0, 1)
    return {
        mark: estimate(bootstrap(_ssim(iterates[place], originals, truths.normalization).numpy(), groups=truths.groups))
        for mark, place in zip(MARKS, places, strict=True)
    }


def _label_recovery(labels: Tensor, truths: Truths) -> Estimate:
    """The share of each batch's labels that were found, repeats counted; order within a batch says nothing."""
    shares = []
    for found, true in zip(labels, truths.labels, strict=True):
        classes = int(max(found.max(), true.max())) + 1
        both = torch.minimum(torch.bincount(found, minlength=classes), torch.bincount(true, minlength=classes))
        shares.append(float(both.sum()) / len(true))
    return estimate(bootstrap(np.asarray(shares)))


def _trace(attack: str, role: Role, outcome: Reconstruction) -> Trace:
    # Rounding can take a cost of zero below it, where a logarithmic axis cannot follow.
    costs = outcome.costs.double().clamp_min(1e-8).numpy()
    low, median, high = np.nanquantile(np.where(np.isfinite(costs), costs, np.nan), [0.25, 0.5, 0.75], axis=0)
    return Trace(
        attack=attack,
        role=role,
        steps=outcome.steps,
        median=median.tolist(),
        low=low.tolist(),
        high=high.tolist(),
    )


def _pictures(images: Tensor, normalization: Normalization) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    mean, std = normalization.mean, normalization.std
    return to_pixels(gray_gaps(images, mean, std), mean, std).clamp(0, 1).float().numpy()
