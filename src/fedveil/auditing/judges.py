"""The networks that pictures are compared by: the auditor's tools, which no attack sees."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedveil.auditing.settings import AuditSettings
from fedveil.errors import FedveilError
from fedveil.leakage.lpips import load
from fedveil.leakage.reference import reference
from fedveil.leakage.score import Classifier
from fedveil.tasks.task import Task


def check_judges(task: Task, settings: AuditSettings) -> None:
    """Refuse an LPIPS distance whose weights are missing or damaged, or that cannot take these pictures."""
    if settings.lpips == "none":
        return
    load(settings.lpips)
    if task.shape[0] not in (1, 3):
        raise FedveilError(f"lpips takes pictures of 1 or 3 channels, these have {task.shape[0]}: use lpips 'none'")


def compared_by(
    task: Task, settings: AuditSettings
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
