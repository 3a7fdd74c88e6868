"""DP-SGD (Abadi et al. 2016): clip the gradient of every example, add noise to their sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.defenses.base import Facts, Knowledge, Strength, SummedStep, trusting
from fedveil.defenses.densities import gaussian
from fedveil.defenses.dp_clip import noise_measures
from fedveil.defenses.guarantee import ONE_EXAMPLE, Exposure, GaussianRelease, Guarantee
from fedveil.defenses.noise import noisy
from fedveil.defenses.poisson import poisson_sample
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree


@defenses.register("dp-sgd")
@declared
class DPSGD(SummedStep):
    """Clip every example's gradient to `clip`, sum, add N(0, (noise_multiplier·clip)²), divide by the batch size.

    Batches are drawn by Poisson sampling: each of a client's n examples joins a step by a coin of its own, with
    chance batch_size/n. The sum is divided by the planned batch size, and an empty batch is answered by noise alone:
    the size of a batch must not show. In `Guard` the training loop makes the batches: the ledger's ε holds there
    only if it takes them from `poisson_loader`, tells Guard the planned size and sends no batch size.

    FedEM's text experiments take noise_multiplier = 1e-3 and clip = 1, whose ε is in the millions: nothing is
    proven. Models with batch norm are refused, since it mixes the examples of a batch.
    """

    paper = "Abadi et al. 2016; a baseline of FedEM's text experiments"
    promises = "ε at δ for one training example, over the run"
    strength = Strength("noise_multiplier", "up", weak=0.01, strong=2.0)
    revision = 2  # sums round otherwise
    random_sizes = True
    weaknesses = (
        "One example is hidden, not what many examples of a client have in common.",
        "Noise that hides an example in the accountant's worst case costs much accuracy on few examples.",
        "At the small noise of some papers ε is astronomical, and an attack meets a nearly clean gradient.",
    )
    noise_multiplier: Positive = 1.0  # σ in the paper: noise on the sum, as a multiple of the clip
    clip: Positive = 1.0  # C in the paper: largest norm of one example's gradient

    def sample(self, labels: Tensor, size: int, streams: Streams) -> Tensor:
        """Each example with chance size/n, by a coin of its own."""
        return poisson_sample(len(labels), size, streams)

    def total(self, batch: ClientBatch) -> StepResult:
        """Σᵢ gᵢ · min(1, clip/‖gᵢ‖)."""
        clients, size = batch.targets.shape[:2]
        if size:
            total, loss = batch.clipped_sum(self.clip)
        else:
            total = batch.params.map(torch.zeros_like)
            loss = next(iter(total.values())).new_zeros(clients)
        return StepResult(total, batch.buffers, loss, batch.inputs)

    def release(self, total: Tree, batch: ClientBatch) -> Tree:
        """(total + N(0, (noise_multiplier·clip)²)) / planned batch size."""
        noise = noisy(total, self.noise_multiplier * self.clip, batch.streams.normal_like)
        return noise / (batch.targets.shape[1] if batch.planned is None else batch.planned)

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """The Poisson-sampled Gaussian mechanism in every step; the accountant adds up."""
        return Guarantee(
            f"Formal guarantee: one training example is hidden by noise {self.noise_multiplier:g} times its greatest "
            "part in a step; nothing is promised for what many examples share.",
            formal=True,
            protects=ONE_EXAMPLE,
            mechanism=GaussianRelease(self.noise_multiplier, exposure.uses(self.acts_at), exposure.example_rate),
        )

    def measures(self, update: Tree) -> dict[str, float]:
        """Noise against the clipped signal, and the cosine that follows, for a batch of one example."""
        found = noise_measures(update, self.clip, (self.noise_multiplier * self.clip) ** 2)
        return {f"{name} (batch of 1)": value for name, value in found.items()}

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """As it is, but for its size: of one example clipping leaves the direction, of several about that."""
        if facts.in_target(self.acts_at) is None:
            return trusting(observed, bound=math.inf)
        sigma = self.noise_multiplier * self.clip / facts.batch_size
        return trusting(observed, variance=sigma**2, bound=self.clip if facts.batch_size == 1 else math.inf)

    def resent(self, given: Tree, facts: Facts, streams: Streams) -> Tree:
        """The same noise on the mean of the clipped gradients."""
        return noisy(given, self.noise_multiplier * self.clip / facts.batch_size, streams.normal_like)

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """Gaussian around the mean of the clipped gradients of the examples."""
        return gaussian(observed, given, self.noise_multiplier * self.clip / facts.batch_size)
