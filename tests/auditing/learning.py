"""An attack that learns, small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.lab import Lab
from fedveil.attacks.scene import Scene
from fedveil.fields import declared


@declared
class Nearest(Attack):
    """Hand in the auxiliary picture whose own update is most like the observed one."""

    name = "test-nearest"
    revision = 1

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"auxiliary"})

    def fit(self, lab: Lab) -> dict[str, Tensor]:
        assert lab.auxiliary is not None
        inputs, labels = lab.auxiliary.batch(list(range(len(lab.auxiliary))))
        assert isinstance(inputs, Tensor)
        streams = lab.streams.rows([0] * len(labels))
        messages = lab.messages(inputs[:, None], labels[:, None], streams)
        return {"inputs": inputs, "labels": labels, "updates": messages.flat()}

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        seen = nn.functional.normalize(scene.updates.message.flat(), dim=1)
        known = nn.functional.normalize(fitted["updates"], dim=1)
        best = (seen @ known.T).argmax(1)
        nothing = torch.full((scene.count,), torch.nan)
        return Reconstruction(fitted["inputs"][best][:, None], fitted["labels"][best][:, None], nothing, 0.0)
