"""Central differential privacy (Geyer et al. 2017): a trusted server clips the updates and adds noise to their mean."""

from __future__ import annotations

import math

from torch import Tensor

from fedveil.defenses.base import Defense, Strength
from fedveil.defenses.clip import clipped
from fedveil.defenses.dp_clip import noise_measures
from fedveil.defenses.guarantee import ALL_DATA, Exposure, GaussianRelease, Guarantee
from fedveil.defenses.noise import noisy
from fedveil.fields import Positive, declared
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree, per_client


@defenses.register("cdp")
@declared
class CDP(Defense):
    """On a trusted server: clip each update to `clip`, and add N(0, (noise_multiplier·clip)²) to their sum.

    Hides what one client sent from those who see the models only. The server takes the plain mean: weights by size
    would let a large client exceed its bound. Each of m updates gets noise of variance
    (noise_multiplier·clip)²/m, which adds up to that.

    Neighbors differ in all data of one client, which moves the sum by up to 2·clip, and a round has equally many
    clients every time. Geyer et al. count a client more or less under Poisson sampling, which gives a smaller ε for
    the same noise, but is not how a round is drawn here.
    """

    place = "server"
    paper = "Geyer et al. 2017"
    promises = "ε at δ for all data of a client, against all but the server"
    strength = Strength("noise_multiplier", "up", weak=0.1, strong=10.0)
    matched_as_it_is = True
    weaknesses = (
        "The server is trusted: an honest-but-curious server sees every update as it is, and this defense does "
        "nothing against it.",
        "Who listens in on a client's upload sees it as it is, too.",
        "With few clients the noise on the mean is large.",
    )
    noise_multiplier: Positive = 1.0  # σ in the paper: noise on the sum, as a multiple of the clip
    clip: Positive = 1.0  # S in the paper: largest norm of a client's update

    def aggregate(self, updates: Tree, weights: Tensor, streams: Streams) -> Tree:
        """u · min(1, clip/‖u‖) + N(0, (noise_multiplier·clip)²/m), such that the weighted mean is the plain one."""
        sigma = self.noise_multiplier * self.clip / math.sqrt(updates.count)
        protected = noisy(clipped(updates, self.clip), sigma, streams.normal_like)
        equal = weights.mean() / weights
        return protected.map(lambda u: u * per_client(equal.to(u), u))

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """A Gaussian mechanism of sensitivity 2·clip in every round, on a random part of the clients."""
        # The clients of a round stay the same over its steps, so sampling helps only where a round has one step.
        rate = exposure.sampling_rate if exposure.steps_per_round == 1 else 1.0
        return Guarantee(
            f"Formal guarantee: noise {self.noise_multiplier / 2:.3g} times the greatest effect of one client's data "
            "on the sum, for those who see the models only; none against the server, which sees every update.",
            formal=True,
            protects=ALL_DATA,
            mechanism=GaussianRelease(self.noise_multiplier / 2, exposure.uses(self.acts_at), rate, "fixed"),
            caveat="This holds against those who see the models only: the server, and who listens in on it, see every "
            "update as it is.",
        )

    def measures(self, update: Tree) -> dict[str, float]:
        """The noise on the sum against one client's part in it."""
        found = noise_measures(update, self.clip, (self.noise_multiplier * self.clip) ** 2)
        return {"noise on the sum to one client's part": found["noise-to-signal ratio"]}
