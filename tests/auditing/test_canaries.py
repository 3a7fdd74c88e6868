"""Canaries: the right mechanisms keep their promise, and those broken on purpose are caught."""

from __future__ import annotations

from functools import cache

import pytest

import fedveil as fv
from fedveil.auditing.canaries import CanaryAudit, CanarySettings, audit_privacy
from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.defenses.base import Defense
from fedveil.defenses.cdp import CDP
from fedveil.defenses.clip import clipped
from fedveil.defenses.dp_gaussian import DPGaussian
from fedveil.defenses.dp_sgd import DPSGD
from fedveil.defenses.noise import noisy
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.streams import Streams
from fedveil.tree import Tree

MANY = CanarySettings(canaries=40_000)  # for ε = 2.25: half the noise, which is ε = 4.8, shows about 2.6


@cache
def task() -> fv.Task:
    return fv.task("digits", model="mlp:hidden=[2]", limit=100)


@declared
class HalfSGD(DPSGD):
    """DP-SGD with half the noise that it promises."""

    def release(self, total: Tree, batch: ClientBatch) -> Tree:
        return DPSGD(noise_multiplier=self.noise_multiplier / 2, clip=self.clip).release(total, batch)


@declared
class LooseSGD(DPSGD):
    """DP-SGD that clips to three times what it promises."""

    def total(self, batch: ClientBatch) -> StepResult:
        return DPSGD(noise_multiplier=self.noise_multiplier, clip=3 * self.clip).total(batch)


@declared
class HalfGaussian(DPGaussian):
    """The Gaussian mechanism with half the noise."""

    def protect(self, update: Tree, call: object) -> Tree:
        return noisy(clipped(update, self.clip), self.sigma / 2, call.streams.normal_like)  # type: ignore[attr-defined]


@declared
class HalfCDP(CDP):
    """A trusted server that adds half the noise."""

    def aggregate(self, updates: Tree, weights: object, streams: Streams) -> Tree:
        half = CDP(noise_multiplier=self.noise_multiplier / 2, clip=self.clip)
        return half.aggregate(updates, weights, streams)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "right, half",
    [
        (DPSGD(noise_multiplier=2.0), HalfSGD(noise_multiplier=2.0)),
        (DPGaussian(epsilon=2.25, delta=1e-6), HalfGaussian(epsilon=2.25, delta=1e-6)),
        (CDP(noise_multiplier=4.0), HalfCDP(noise_multiplier=4.0)),
    ],
)
def test_half_the_noise_is_caught(right: Defense, half: Defense) -> None:
    found = audit_privacy(right, task(), MANY)
    assert found.promised == pytest.approx(2.25, abs=0.02)
    assert 0.8 < found.epsilon < 0.8 * found.promised
    assert not found.broken
    assert "holds as far as 40,000 canaries can tell" in found.sentence
    broken = audit_privacy(half, task(), MANY)
    assert broken.promised == found.promised
    assert broken.broken
    assert broken.sentence.startswith("BROKEN: ε ≥ ")


def test_a_clip_that_is_too_large_is_caught() -> None:
    assert audit_privacy(LooseSGD(noise_multiplier=2.0), task(), CanarySettings(canaries=4000)).broken


def test_sampling_and_steps_are_as_the_ledger_counts_them() -> None:
    settings = CanarySettings(canaries=300, rounds=6, batch_size=64)
    found = audit_privacy("dp-sgd:noise_multiplier=0.5", task(), settings)
    slots = 160 + 32  # the entries of the model, and real examples
    assert found.example_rate == pytest.approx(64 / slots)
    assert (
        found.epsilon
        < found.promised
        < audit_privacy("dp-sgd:noise_multiplier=0.5", task(), CanarySettings(canaries=300, rounds=6)).promised
    )
    assert found.epsilon > 0.5  # an attacker who knows the rate still tells most coins


def test_the_same_seed_gives_the_same_finding_and_it_is_plain_data() -> None:
    settings = CanarySettings(canaries=200, rounds=2)
    first, again, other = (audit_privacy("dp-laplace:epsilon=2", task(), settings, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert CanaryAudit.model_validate_json(first.model_dump_json()) == first
    assert first.provable < first.promised
    assert any("use more canaries" in note for note in first.notes)


@pytest.mark.parametrize(
    "defense, settings, line",
    [
        ("gradient-dropout", {}, "mechanisms that clip and add noise"),
        ("clip:norm=1", {}, "mechanisms that clip and add noise"),
        ("dp-clip:sigma=0", {}, "no promise to hold canaries against"),
        ("dp-gaussian+dp-clip", {}, "one defense at a time"),
        ("dp-gaussian", {"batch_size": 8}, "batch_size is for dp-sgd"),
        ("dp-sgd", {"canaries": 5}, "10 or more"),
        ("dp-sgd", {"rounds": 0}, "rounds must be 1 or more"),
        ("dp-sgd", {"delta": 0.0}, "delta must be between 0 and 1"),
        ("dp-sgd", {"confidence": 1.0}, "confidence must be"),
    ],
)
def test_what_cannot_be_tried_gets_one_line(defense: str, settings: dict[str, float], line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        audit_privacy(defense, task(), CanarySettings(**settings))  # type: ignore[arg-type]
