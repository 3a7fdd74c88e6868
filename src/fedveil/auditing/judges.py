"""The networks that pictures are compared by: the auditor's tools, which no attack sees."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedveil.auditing.settings import Audit
from fedveil.leakage.lpips import load
from fedveil.leakage.reference import reference
from fedveil.leakage.score import Classifier
from fedveil.tasks.task import Task


def compared_by(
    task: Task, settings: Audit
) -> tuple[Classifier | None, Callable[[Tensor, Tensor], Tensor] | None, list[str]]:
    """The reference classifier and the LPIPS distance that an audit asks for, and a sentence on each."""
    words = []
    classifier = distance = None
    if settings.reference == "trained" and task.classes is not None:
        classifier = reference(task)
        words.append(
            f"The reference classifier is ours: a small network trained on {classifier.examples:,} images of the "
            f"task's own training data, right on {100 * classifier.accuracy:.1f} % of held-out ones. KL, feature MSE, "
            "logit MSE and identification by features come from it and cannot be compared with those of the papers."
        )
    if settings.lpips != "none":
        distance = load(settings.lpips)
        words.append(f"LPIPS is computed with the {settings.lpips} network; small images are enlarged to 64 pixels.")
    return classifier, distance, words
