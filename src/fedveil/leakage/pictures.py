"""Pictures: compared pixel by pixel, by structure, and by what networks see in them. Readable without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedveil.errors import FedveilError
from fedveil.leakage.modality import Modality, Scores, Words

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.leakage.lpips import Net
    from fedveil.leakage.truths import Truths
    from fedveil.tasks.examples import Examples
    from fedveil.tasks.layout import Layout
    from fedveil.tasks.normalization import Normalization
    from fedveil.tasks.task import Task


class Classifier(Protocol):
    """A classifier to compare pictures by, such as `reference(task)`. It takes normalized images."""

    def features(self, images: Tensor) -> Tensor: ...

    def logits(self, images: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Pictures(Modality):
    """Images (channels, height, width) whose pixels lie between 0 and 1 once the normalization is taken off."""

    name = "pictures"
    words = Words(
        one="image",
        many="images",
        rebuilt="a picture",
        mean="mean image",
        picked="identified",
        not_picked="not identified",
    )
    headline = ("identified", "identified_features")
    shown = ("identified", "psnr", "ssim", "mse")
    nearness = "psnr"
    caption = ("psnr_pixel", "psnr")  # first the error of the pixels that are shown, not that of the normalized input
    measure_notes = {
        "identified_features": "Images were compared by what a classifier sees in them: that found more than "
        "comparing pixels."
    }

    normalization: Normalization | None = None
    reference: Classifier | None = None  # the auditor's tools, which no attack sees
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None

    # ---- before an audit -------------------------------------------------------------------------------------

    def check(self, task: Task, tools: Mapping[str, str]) -> None:
        """Refuse inputs that are no pictures, and an LPIPS distance whose weights are missing or damaged."""
        if task.perturb is not None:
            raise FedveilError(
                f"an audit scores images, and {task.name} has other inputs: fedveil train takes them, attacks do not"
            )
        if len(task.shape) != 3:
            table = ": if they are rows of a table, name its columns (Task(..., columns=...))"
            raise FedveilError(
                f"an audit scores images of shape (channels, height, width); these inputs are {task.shape}"
                + (table if len(task.shape) == 1 else "")
            )
        if task.shape[0] not in (1, 3) and task.shape[2] in (1, 3):
            raise FedveilError(
                f"an audit scores images of shape (channels, height, width); these are {task.shape}, with the channels "
                "last: write images.permute(0, 3, 1, 2)"
            )
        if tools.get("lpips", "none") != "none":
            from fedveil.leakage.lpips import load

            load(cast("Net", tools["lpips"]))
            if task.shape[0] not in (1, 3):
                raise FedveilError(
                    f"lpips takes pictures of 1 or 3 channels, these have {task.shape[0]}: use lpips 'none'"
                )
        pixel_map(task)

    def equipped(self, task: Task, tools: Mapping[str, str]) -> tuple[Self, list[str]]:
        """With the normalization of a task, a classifier of its own data and the LPIPS distance, as asked for."""
        from fedveil.leakage.lpips import load
        from fedveil.leakage.reference import reference

        made, words = replace(self, normalization=pixel_map(task)), []
        if tools.get("reference") in ("trained", "sketched") and task.classes is not None:
            classifier = reference(task, sketched=tools["reference"] == "sketched")
            made = replace(made, reference=classifier)
            words.append(
                f"The reference classifier is ours: a small network trained on {classifier.examples:,} images of the "
                f"task's own training data, right on {100 * classifier.accuracy:.1f} % of held-out ones. KL, feature "
                "MSE, logit MSE and identification by features come from it and cannot be compared with those of the "
                "papers."
            )
        net = tools.get("lpips", "none")
        if net != "none":
            made = replace(made, lpips=load(cast("Net", net)))
            words.append(f"LPIPS is computed with the {net} network; small images are enlarged to 64 pixels.")
        return made, words

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """Pixels between 0 and 1, normalized."""
        from fedveil.tasks.layout import Layout

        return Layout(self.name, shape, self.to_pixels.box())

    def described(self) -> dict[str, Any]:
        """The normalization, and the content of the networks."""
        judges = {name: getattr(judge, "content", None) for name, judge in self._judges().items()}
        return {**super().described(), "normalization": str(self.normalization), "judges": judges}

    def _judges(self) -> dict[str, object]:
        found: dict[str, object] = {"reference": self.reference, "lpips": self.lpips}
        return {name: judge for name, judge in found.items() if judge is not None}

    def floor(self, train: Examples) -> Tensor:
        """The mean over all training images, read a part at a time: a large data set need not fit into memory."""
        import torch

        from fedveil.leakage.floors import mean_image

        parts = [(mean_image(_tensor(images)).double(), len(labels)) for images, labels in train.batches(4096)]
        total = torch.stack([mean * count for mean, count in parts]).sum(0)
        return (total / sum(count for _, count in parts)).to(torch.get_default_dtype())

    # ---- after the attack ------------------------------------------------------------------------------------

    def score(self, inputs: Tensor, truths: Truths, iterates: Sequence[Tensor] = ()) -> Scores:
        """Every metric, one value per image; within a batch reconstructions are assigned to originals first."""
        from fedveil.leakage.picture_scores import score

        return score(self, inputs, truths, iterates)

    def relate(self, values: Mapping[str, Mapping[str, Tensor]], floors: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Add RDLV: how much more similar than the better floor. Which floor is better, their means decide."""
        from fedveil.leakage.floors import better_floor
        from fedveil.leakage.metrics import rdlv

        means = {name: float(values[name]["ssim"].mean()) for name in floors if name in values}
        if not means:
            return super().relate(values, floors)
        prior = values[better_floor("ssim", means)]["ssim"]
        return {name: {**each, "rdlv": rdlv(each["ssim"], prior)} for name, each in values.items()}

    def exhibit(self, inputs: Tensor) -> Tensor:
        """Pixels between 0 and 1, in single precision."""
        from fedveil.leakage.picture_scores import gray_gaps

        normalization = self.to_pixels
        return normalization.pixels(gray_gaps(inputs, normalization)).clamp(0, 1).float()

    @property
    def to_pixels(self) -> Normalization:
        """The normalization, which only an equipped modality has."""
        if self.normalization is None:
            raise ValueError("pictures are scored and shown by the normalization of a task: see `equipped`")
        return self.normalization

    # ---- words -----------------------------------------------------------------------------------------------

    def recognizable(self, values: Mapping[str, ArrayLike], least: float) -> NDArray[np.bool_] | None:
        """Nearest to the right image, and like it enough."""
        if "ssim" not in values or "identified" not in values:
            return None
        similar: NDArray[np.bool_] = np.asarray(values["ssim"], dtype=float) >= least
        return similar & (np.asarray(values["identified"], dtype=float) >= 0.5)

    def recognizable_note(self, least: float) -> str:
        """By structural similarity."""
        return (
            "A picture counts as recognizable where it is nearer to the right image than to all the others, and its "
            f"structural similarity to it (SSIM: 1 for the same picture, about 0 for unrelated ones) is at least "
            f"{least:g}."
        )


def pixel_map(task: Task) -> Normalization:
    """The normalization of a task's images; those without a stated one are taken as pixels, if they can be."""
    from fedveil.tasks.normalization import Normalization

    if task.normalization is not None:
        return task.normalization
    sample = _tensor(task.train.batch(list(range(min(256, len(task.train)))))[0])
    low, high = float(sample.min()), float(sample.max())
    if low < -1e-6 or high > 1 + 1e-6:
        raise FedveilError(
            f"the inputs range from {low:.4g} to {high:.4g} and are not pixels "
            "between 0 and 1, so pictures cannot be scored: if they were normalized, tell the Task how, "
            "normalization=Normalization(mean, std), normalized=True; else give pixels"
        )
    channels = task.shape[0]
    return Normalization((0.0,) * channels, (1.0,) * channels)


def _tensor(inputs: Any) -> Tensor:
    """Images in single precision, in which they are judged whatever the model's own type is."""
    images: Tensor = inputs  # `check` admits images only
    return images.float()
