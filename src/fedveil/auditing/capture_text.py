"""Captured updates of text: the task that they come from has the vocabulary, and with it the form of a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.auditing.candidates import Originals
from fedveil.auditing.capture_checks import Attackable, CaptureSetting, check_updates, examples_of, stated_chain
from fedveil.auditing.capture_truth import Data
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, Truth
from fedveil.registry import datasets, models
from fedveil.tasks.datasets.text import TextSet
from fedveil.tasks.inputs import Inputs
from fedveil.tasks.models.transformer import TextModel, nearest_tokens
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.own_files import is_reference
from fedveil.tasks.task import Task, task
from fedveil.tasks.text_form import NO_TOKEN, TextForm, tokens_of

AS_IT_IS = Normalization((0.0,), (1.0,))  # of embeddings: no pixels, no map


def text_task(
    data: Data | None, setting: CaptureSetting, captures: Sequence[Capture], root: Path | None
) -> Task | None:
    """The task of text that captures are attacked with; None where the data are none."""
    if isinstance(data, Task):
        return data if data.text is not None else None
    if not isinstance(data, str) or is_reference(data) or not isinstance(datasets.parse(data), TextSet):
        return None
    given, described = setting.model, captures[0].public.model if captures else None
    if isinstance(described, dict) and given is None:
        described = models.spell(models.build(**described))
    named = given if given is not None else described
    if not isinstance(named, str):
        raise FedveilError("name the model of the captured text: --model, or give a Task as data in Python")
    return task(data, model=named, clients=1, data_root=root)


def check_text(captures: Sequence[Capture], setting: CaptureSetting, text: Task) -> Attackable:
    """Refuse what cannot be attacked together or does not fit the model of the task, before any long work."""
    model = setting.model if isinstance(setting.model, nn.Module) else text.model
    if not isinstance(model, TextModel):
        raise FedveilError(f"{type(model).__name__} is no model of text: give the one of the task, or leave it out")
    check_updates(captures, model)
    chain, stated = stated_chain(captures[0], setting)
    return Attackable(model, text.model_name, text.shape, text.classes, AS_IT_IS, chain, stated)


def sentences_of(truths: Sequence[Truth], captures: Sequence[Capture], known: Attackable, text: Task) -> Originals:
    """The sentences behind every capture, checked: they must belong to it."""
    assert text.text is not None
    inputs, seen, labels = [], [], []
    for truth, capture in zip(truths, captures, strict=True):
        size = examples_of(capture)
        tokens = _checked(truth.inputs, text.text)
        if len(tokens) not in (size, sum(capture.batch_sizes)):
            raise FedveilError(
                f"a truth holds {len(tokens)} examples, its capture is of {size}: they do not belong together"
            )
        moved = tokens if isinstance(truth.seen, Tensor) else nearest_tokens(known.model, capture.before, truth.seen)
        inputs.append(tokens[:size])
        seen.append(moved[:size])
        labels.append(truth.targets[:size])
    wrong = [each for each in labels if each.shape[1:] != text.target.shape]
    if wrong:
        raise FedveilError(f"targets of a truth have the shape {tuple(wrong[0].shape)}: they are of another task")
    return Originals(torch.stack(inputs), torch.stack(labels), torch.stack(seen), captures[0].round)


def _checked(inputs: Inputs, form: TextForm) -> Tensor:
    if isinstance(inputs, Tensor) and inputs.dim() != 2:
        raise FedveilError(f"a truth of text holds tokens (N, {form.length}), not a tensor of {tuple(inputs.shape)}")
    tokens = tokens_of(inputs).float()
    if tokens.shape[-1] != form.length or tokens.dim() != 2:
        raise FedveilError(
            f"a truth holds sentences of {tokens.shape[-1]} places, the task's have {form.length}: they do not belong "
            "together"
        )
    if bool(((tokens < NO_TOKEN) | (tokens >= form.entries)).any()):
        raise FedveilError(f"a truth holds tokens that are not among the {form.entries:,} of the task's vocabulary")
    return tokens


def as_text(setting: CaptureSetting, text: Task) -> CaptureSetting:
    """The setting with what the task knows."""
    return replace(setting, loss=text.loss, classes=text.classes)
