"""`fedveil attack`: reconstruct what is behind captured updates, and score it where the truth is at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Reconstruction as Found
from fedveil.attacks.problem import Reconstruction
from fedveil.auditing.audit_result import LeakageTable
from fedveil.auditing.captures import (
    CaptureSetting,
    attack_captures,
    check_captures,
    check_labels,
    examples_of,
    named_model,
    pixel_map,
    steps_alike,
    truth_labels,
)
from fedveil.auditing.result import Row
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import rows_of, score_finding
from fedveil.cli.display import Display
from fedveil.cli.folder import own_folder
from fedveil.clients.engine import BACKENDS
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError, unknown_name
from fedveil.federation.capture import Capture, Truth
from fedveil.fields import field_names, parse_spec
from fedveil.files import writable_folder, write_atomically
from fedveil.leakage.assignment import assign
from fedveil.leakage.pictures import Pictures
from fedveil.leakage.truths import Truths
from fedveil.registry import attacks, datasets
from fedveil.tasks.datasets.base import DataSet
from fedveil.tasks.examples import ArrayExamples
from fedveil.tasks.normalization import Normalization
from fedveil.tasks.own_files import is_reference
from fedveil.workers import Workers

LABELS = ("known", "recovered", "idlg", "optimized")
MARK = "attack.json"  # written first, without scores, and last: a killed attack is known as one
UNFINISHED = b"{}"
CANDIDATES = 100


@dataclass(frozen=True)
class AttackOptions:
    """What `fedveil attack` was given."""

    captures: list[Path]
    attack: str
    truth: list[Path]
    truths: Path | None
    model: str | None
    shape: str | None
    classes: int | None
    defense: str | None
    labels: str | None
    data: str | None
    data_root: Path | None
    out: Path | None
    overwrite: bool
    seed: int
    backend: str
    workers: str
    as_json: bool
    quiet: bool


def run_attack(given: AttackOptions) -> None:
    """Attack all captures as one stack of victims."""
    pool = Workers.of(given.workers)
    with own_folder(given.out, "attack", MARK) as out:
        if _finished(out / MARK) and not given.overwrite:
            raise FedveilError(f"{out} holds an earlier attack: choose another --out or add --overwrite")
        _run(given, out, pool)


def _run(given: AttackOptions, out: Path, pool: Workers) -> None:
    if given.backend not in BACKENDS:
        raise unknown_name("backend", given.backend, BACKENDS)
    paths = _capture_paths(given.captures)
    captures = [Capture.load(path) for path in paths]
    truths = [Truth.load(path) for path in _truth_paths(given, paths)]
    attack, assumed = _attack(given, captures, bool(truths))
    setting = _setting(given, captures[0])
    if not steps_alike(captures[0]):
        setting = replace(setting, unroll=False)
        assumed.append("the local steps differ in size or rate: their mean gradient is matched")
    known = check_captures(captures, setting)
    if attack.choices().labels == "idlg" and examples_of(captures[0]) != 1:
        raise FedveilError(
            f"iDLG reads the label of a single example, and this update is of {examples_of(captures[0])}: use "
            "--labels recovered"
        )
    originals = labels = None
    if truths:
        originals = _originals(truths, captures, known.shape)
        labels = truth_labels([truth.targets for truth in truths], captures)
        check_labels(labels, captures, known.classes)
    others = _others(given, originals, labels, pixel_map(captures[0], setting)) if originals is not None else None
    display = Display(quiet=given.quiet)
    with display.running(), pool:
        for line in assumed:
            display.stage(line)
        display.stage(f"attacking {len(captures)} update{'s' * (len(captures) > 1)} with {attack.name}")
        found = attack_captures(
            captures,
            attack,
            setting=setting,
            labels=labels if attack.choices().labels == "known" else None,
            seed=given.seed,
            backend=given.backend,
            progress=display.watch().attack,
            workers=pool,
        )
        kind = Pictures(pixel_map(captures[0], setting))
        rows, arranged = _scored(attack, found, originals, others, kind)
        _save(out, paths, found, arranged, originals, rows, kind)
    _show(given, out, rows, found, 0 if others is None else others.shape[1] + 1)


# ---- what was given ----------------------------------------------------------------------------------------


def _capture_paths(given: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in given:
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise FedveilError(f"{path} holds no capture (*.safetensors)")
        found += inside
    if len({path.stem for path in found}) < len(found):
        raise FedveilError("two captures have the same file name: attack them one by one")
    return found


def _truth_paths(given: AttackOptions, captures: list[Path]) -> list[Path]:
    if given.truths is not None:
        if given.truth:
            raise FedveilError("give --truth or --truths, not both")
        return [given.truths / path.name for path in captures]
    if given.truth and len(given.truth) != len(captures):
        raise FedveilError(
            f"{len(captures)} captures but {len(given.truth)} truths: give one --truth for each, in order"
        )
    return given.truth


def _attack(given: AttackOptions, captures: list[Capture], scored: bool) -> tuple[Attack, list[str]]:
    """The attack with its source of labels, and what was assumed on the way."""
    name, fields = parse_spec(given.attack)
    cls = attacks.load(name)
    if given.labels is not None:
        if given.labels not in LABELS:
            raise unknown_name("source of labels", given.labels, LABELS)
        if "labels" in field_names(cls):
            fields["labels"] = given.labels
    made: Attack = attacks.build(name, **fields)
    wants = made.choices().labels
    if given.labels not in (None, wants):
        raise FedveilError(f"{name} always takes labels '{wants}': leave --labels out, or use inverting-gradients")
    if wants != "known" or scored:
        return made, []
    if "labels" in fields:
        raise FedveilError("labels 'known' needs the truths (--truth or --truths): use --labels recovered")
    return attacks.build(name, **fields, labels="recovered"), ["no truth is given: the labels are read off the update"]


def _setting(given: AttackOptions, first: Capture) -> CaptureSetting:
    """What is known beyond the files. A model needs its input's shape and its classes."""
    shape = _shape(given.shape)
    setting = CaptureSetting(shape=shape, classes=given.classes)
    if given.defense is not None:
        setting = replace(setting, defense=Chain.of(given.defense))
    told = {"model": given.model, "shape": shape, "classes": given.classes}
    if not any(told.values()):
        return setting
    facts = first.facts | {name: value for name, value in told.items() if value is not None}
    file = given.model if is_reference(given.model) else None
    return replace(setting, model=named_model(replace(first, facts=facts), file))


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or len(parts) != 3:
        raise FedveilError(f"--shape must be channels,height,width such as 1,28,28 (got '{text}')")
    return tuple(int(part) for part in parts)


# ---- the truth, for scoring only -----------------------------------------------------------------------------


def _originals(truths: list[Truth], captures: list[Capture], shape: tuple[int, ...]) -> Tensor:
    """The images behind every capture: (captures, examples, C, H, W)."""
    stacked: list[Tensor] = []
    for truth, capture in zip(truths, captures, strict=True):
        size = examples_of(capture)
        if not isinstance(truth.inputs, Tensor) or truth.inputs.dim() != 4:
            raise FedveilError("only images can be scored: this truth holds other inputs")
        if tuple(truth.inputs.shape[1:]) != shape:
            raise FedveilError(
                f"a truth holds images of shape {tuple(truth.inputs.shape[1:])}, its capture is of inputs of {shape}: "
                "they do not belong together"
            )
        if not truth.inputs.is_floating_point():
            raise FedveilError(f"a truth holds images as the model takes them, not {truth.inputs.dtype}")
        if len(truth.inputs) not in (size, sum(capture.batch_sizes)):  # of one local epoch, or of all
            raise FedveilError(
                f"a truth holds {len(truth.inputs)} examples, its capture is of {size}: they do not belong together"
            )
        stacked.append(truth.inputs[:size].float())
    return torch.stack(stacked)


def _others(
    given: AttackOptions, originals: Tensor, labels: Tensor | None, normalization: Normalization
) -> Tensor | None:
    """The images to tell each original from: a data set's test images, else the other originals, if there are any."""
    flat = originals.flatten(0, 1)
    if given.data is not None:
        source: DataSet = datasets.parse(given.data)
        loaded = source.load(given.data_root)
        if loaded.shape != tuple(flat.shape[1:]):
            raise FedveilError(
                f"{given.data} has images of shape {loaded.shape}, the truths of {tuple(flat.shape[1:])}"
            )
        test = loaded.test
        pool = ArrayExamples(torch.from_numpy(test.images), torch.from_numpy(test.labels), normalization)
        images, classes = pool.batch(list(range(len(pool))))
        assert isinstance(images, Tensor)
        assert labels is not None
        return images[
            Pictures().distractors(flat, labels.flatten(), (images, classes), count=CANDIDATES, seed=given.seed)
        ]
    if len(flat) < 2:
        return None
    places = [[other for other in range(len(flat)) if other != place] for place in range(len(flat))]
    return flat[torch.tensor(places)]


def _scored(
    attack: Attack,
    found: Mapping[Role, Reconstruction],
    originals: Tensor | None,
    others: Tensor | None,
    kind: Pictures,
) -> tuple[list[Row], dict[Role, Tensor]]:
    """The rows of the table, and the pictures in the order of the originals."""
    if originals is None:
        return [], {role: outcome.inputs for role, outcome in found.items()}
    labels = torch.zeros(originals.shape[:2], dtype=torch.int64)
    true = Truths(originals, labels, originals, (1,) * len(originals), distractors=others)
    scores = [
        score_finding(
            attack.name, role, Found(outcome.inputs, outcome.labels, outcome.cost, outcome.seconds), true, kind
        )
        for role, outcome in found.items()
    ]
    arranged = {role: assign(outcome.inputs, originals)[0] for role, outcome in found.items()}
    return rows_of(scores, true, kind), arranged


# ---- what comes out ------------------------------------------------------------------------------------------


def _save(
    out: Path,
    paths: list[Path],
    found: Mapping[Role, Reconstruction],
    arranged: Mapping[Role, Tensor],
    originals: Tensor | None,
    rows: list[Row],
    kind: Pictures,
) -> None:
    """One PNG per image, all images as tensors, and the scores."""
    write_atomically(out / MARK, UNFINISHED)
    shown: dict[str, NDArray[np.float32]] = {role: _pixels(each, kind) for role, each in arranged.items()}
    if originals is not None:
        shown["original"] = _pixels(originals, kind)
    for name, pictures in shown.items():
        for path, batch in zip(paths, pictures, strict=True):
            folder = writable_folder(out / path.stem)
            for place, picture in enumerate(batch):
                _save_png(folder / f"{name}-{place:03}.png", picture)
    tensors: dict[str, Any] = dict(shown)
    for role, outcome in found.items():
        tensors[f"{role}.labels"] = outcome.labels.numpy()
        tensors[f"{role}.cost"] = outcome.cost.double().numpy()
    write_atomically(out / "reconstructions.safetensors", safetensors.numpy.save(tensors))
    scores = {"captures": [str(path) for path in paths], "rows": [row.model_dump() for row in rows]}
    write_atomically(out / MARK, json.dumps(scores, indent=1).encode())


def _finished(mark: Path) -> bool:
    return mark.exists() and mark.read_bytes() != UNFINISHED


def _pixels(images: Tensor, kind: Pictures) -> NDArray[np.float32]:
    shown: NDArray[np.float32] = kind.exhibit(images.flatten(0, 1)).reshape(images.shape).numpy()
    return shown


def _save_png(path: Path, picture: NDArray[np.float32]) -> None:
    values = (picture * 255).round().astype(np.uint8)
    if len(values) == 3:
        Image.fromarray(values.transpose(1, 2, 0)).save(path)
    else:  # one gray channel; of other numbers of channels, the first
        Image.fromarray(values[0]).save(path)


def _show(given: AttackOptions, out: Path, rows: list[Row], found: Mapping[Role, Reconstruction], among: int) -> None:
    costs = {role: float(outcome.cost.median()) for role, outcome in found.items()}
    if given.as_json:
        plain = [row.model_dump(exclude={"values"}) for row in rows]
        summary = {"out": str(out), "rows": plain, "candidates": among or None, "median_cost": costs}
        print(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    if rows:
        print(LeakageTable(rows, Pictures()))
        among_words = (
            f"The right image was looked for among {among}."
            if among
            else "There are no other images to tell the right one from: name a set with --data."
        )
        print(among_words)
    else:
        told = ", ".join(f"{role} {cost:.3g}" for role, cost in costs.items())
        print(f"Nothing can be scored without the truth (--truth, --truths). Median matching cost: {told}")
    print(f"Reconstructions are in {out}")
