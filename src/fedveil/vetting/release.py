"""`ReleaseGate`: a client attacks the update that it is about to send, and keeps it where it gives too much away."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Links, Reconstruction
from fedveil.attacks.link import LinkTest
from fedveil.attacks.scene import Candidates, Public, Scene, Workbench
from fedveil.clients.engine import Loss
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, stack
from fedveil.fields import Count, Positive, Probability, declared
from fedveil.registry import attacks
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout
from fedveil.tasks.normalization import Normalization

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Decision:
    """Whether an update may go, and what was measured. Numbers that were not measured are None."""

    send: bool
    reason: str
    linked: float | None = None  # share of other batches that explain the update worse than its own; 0.5 is chance
    reconstructed: float | None = None  # how much of its best rebuilt example, beyond the mean of the others; 0 to 1
    seconds: float = 0.0

    def require(self) -> None:
        """Refuse to go on with an update that may not go."""
        if not self.send:
            raise FedveilError(f"the update is withheld: {self.reason}")


class _OverTime(Exception):
    """The time is up."""


@declared
class ReleaseGate:
    """Attacks an update before it is sent, as a server that knows the defense would, and decides by what it finds.

    ```python
    gate = ReleaseGate(most_reconstructed=0.3)
    guard.backward(x, y)
    decision = gate.decide(guard.capture(), model, loss, (x, y), others=(more_x, more_y), defense=guard.chain)
    if decision.send: ...
    ```

    Two questions are asked. Linked: is the true batch told from others of the same size? Reconstructed (pictures only):
    does a quick inversion rebuild an example? A quick attack is weaker than a patient one: an update that passes may
    still leak. One that leaks nothing is withheld by chance in 1 - `most_linked` of the cases.

    Whatever goes wrong, and whatever takes too long, the update is withheld.
    """

    most_linked: Probability = 0.95  # share of other batches that may explain the update worse than the true one
    most_reconstructed: Probability = 0.3  # of an example, beyond what the mean of the others shows
    candidates: Count = 40  # batches that the true one is told from, itself included
    attack: str | None = "inverting-gradients:steps=100"  # of pictures; None: the link test alone
    seconds: Positive = 120.0  # for all of it

    def decide(
        self,
        update: Capture,
        model: nn.Module,
        loss: Loss,
        batch: Batch,
        others: Batch,
        defense: Defense | Chain | str | None = None,
        normalization: Normalization | None = None,
    ) -> Decision:
        """Whether the update may be sent.

        update: as the server will see it: `guard.capture()`, or `fedveil.capture(...)`.
        batch: the inputs and targets behind it, as the model took them; over local steps, those of one epoch.
        others: other examples of the same kind, which are not behind it: the more, the better.
        defense: what protected it; a server knows that.
        normalization: of pictures, if they are not between 0 and 1.
        """
        begun = time.perf_counter()
        try:
            found = self._measured(update, model, loss, batch, others, Chain.of(defense), normalization, begun)
        except _OverTime:
            found = Decision(False, f"the attack on it was not done within {self.seconds:g} seconds")
        except FedveilError as error:
            found = Decision(False, f"it could not be attacked: {error}")
        except Exception as error:  # fails closed; the text of somebody else's error may quote the data
            found = Decision(False, f"the attack on it failed ({type(error).__name__})")
        return replace(found, seconds=time.perf_counter() - begun)

    def _measured(
        self,
        update: Capture,
        model: nn.Module,
        loss: Loss,
        batch: Batch,
        others: Batch,
        chain: Chain,
        normalization: Normalization | None,
        begun: float,
    ) -> Decision:
        update.check(model)
        updates = stack([update], dict(model.named_buffers()))
        if len(batch[1]) != updates.examples:
            raise FedveilError(f"it is of {updates.examples} examples, and the batch has {len(batch[1])}")

        def in_time(done: int = 0, total: int = 0) -> None:
            if time.perf_counter() - begun > self.seconds:
                raise _OverTime

        scene = Scene(
            public=Public(copy.deepcopy(model), loss, _layout(batch[0], normalization), _classes(batch[1], others[1])),
            updates=updates,
            streams=Streams.secure([0]),
            chain=chain,
            bench=Workbench(backend="loop", chunk=1, report=in_time),
        )
        linked = self._linked(scene, batch, others)
        in_time()
        if linked > self.most_linked:
            return Decision(False, f"its batch is told from {linked:.0%} of others", linked)
        if self.attack is None or scene.public.layout.box is None:
            return Decision(True, "no attack found too much in it", linked)
        rebuilt = self._rebuilt(scene, attacks.parse(self.attack), batch, others)
        in_time()
        if rebuilt > self.most_reconstructed:
            return Decision(False, f"{rebuilt:.0%} of an example is rebuilt from it", linked, rebuilt)
        return Decision(True, "no attack found too much in it", linked, rebuilt)

    def _linked(self, scene: Scene, batch: Batch, others: Batch) -> float:
        """The share of other batches that explain the update worse than the true one."""
        size = len(batch[1])
        count = min(self.candidates - 1, len(others[1]) // size)
        if count < 2:
            raise FedveilError(f"there are {len(others[1])} other examples: give {2 * size} or more")
        drawn = scene.streams.fold("others").permutation(len(others[1]))[0][: count * size]
        inputs, labels = (
            torch.cat([own[None], more[drawn].reshape(count, size, *own.shape[1:])])
            for own, more in zip(batch, others, strict=True)
        )
        found: Any = LinkTest().run(replace(scene, candidates=Candidates(inputs[None], labels[None])))
        if not isinstance(found, Links) or not bool(found.scores.isfinite().all()):
            raise FedveilError("the link test came to no numbers")
        own, rest = found.scores[0, 0], found.scores[0, 1:]
        return float((rest < own).double().mean() + (rest == own).double().mean() / 2)

    def _rebuilt(self, scene: Scene, attack: Attack, batch: Batch, others: Batch) -> float:
        """How much of an example a quick inversion rebuilds, of the one that it rebuilds best."""
        labels = batch[1][None] if "labels" in attack.needs else None
        found = attack.run(replace(scene, labels=labels))
        if not isinstance(found, Reconstruction):
            raise FedveilError(f"{attack.name} rebuilds nothing: choose an attack that does")
        truth, made = batch[0].flatten(1).double(), found.inputs[0].flatten(1).double()
        mean = others[0].flatten(1).double().mean(0)
        errors = (truth[:, None] - made[None]).square().mean(2)
        if not bool(errors.isfinite().all()):
            raise FedveilError("the attack came to no numbers")
        rows, columns = linear_sum_assignment(errors.numpy())
        best = errors[rows, columns] / (truth - mean).square().mean(1).clamp_min(1e-12)
        return max(0.0, 1.0 - float(best.min()))


def _layout(inputs: Tensor, normalization: Normalization | None) -> Layout:
    """Pictures have a range; of other inputs nothing is known, and nothing is rebuilt."""
    shape = tuple(inputs.shape[1:])
    if len(shape) != 3 or not inputs.is_floating_point():
        return Layout("records", shape)
    pixels = normalization or Normalization((0.0,) * shape[0], (1.0,) * shape[0])
    return Layout("pictures", shape, pixels.box())


def _classes(targets: Tensor, others: Tensor) -> int | None:
    if targets.dim() != 1 or targets.is_floating_point():
        return None
    return int(torch.cat([targets, others]).max()) + 1
