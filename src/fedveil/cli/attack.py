"""`fedveil attack`: reconstruct what is behind captured updates, and judge it where the truth is at hand."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Reconstruction
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.capture_checks import CaptureSetting
from fedveil.auditing.capture_shop import Asked, CaptureShop, without_known_labels
from fedveil.auditing.captures import attack_captures, capture_files
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.settings import AuditSettings
from fedveil.cli.display import Display
from fedveil.cli.findings import print_findings, print_json, summary
from fedveil.cli.folder import own_folder
from fedveil.cli.stores import store_of
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError, unknown_name
from fedveil.federation.capture import Capture
from fedveil.fields import field_names, parse_spec
from fedveil.files import writable_folder, write_atomically
from fedveil.registry import attacks
from fedveil.tensors import write_safetensors
from fedveil.workers import Workers

LABELS = ("known", "recovered", "idlg", "optimized")
MARK = "attack.json"  # written first, empty, and last: a killed attack is known as one
UNFINISHED = b"{}"


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
    link: bool
    store: Path | None
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
        mark = out / MARK
        if mark.exists() and mark.read_bytes() != UNFINISHED and not given.overwrite:
            raise FedveilError(f"{out} holds an earlier attack: choose another --out or add --overwrite")
        _run(given, out, pool)


def _run(given: AttackOptions, out: Path, pool: Workers) -> None:
    paths = _capture_paths(given.captures)
    asked, told = _asked(given, paths)
    display = Display(quiet=given.quiet)
    with display.running(), pool:
        shop = CaptureShop.open(asked, store_of(given.store), pool)
        write_atomically(out / MARK, UNFINISHED)
        if shop.updates.kind != "gradient" and shop.case.settings.local_steps == "pseudo-gradient":
            told.append("the local epochs differ in size: their mean gradient is matched")
        for line in [*told, *(f"warning: {each}" for each in shop.warnings())]:
            display.stage(line)
        outcome = attack_captures(shop, display.watch(), _command(given))
        outcome.save(out)
        report = outcome.report(out / "report.html")
        _save_pictures(outcome, shop, paths, out)
        write_atomically(out / MARK, json.dumps({"captures": [str(path) for path in paths]}, indent=1).encode())
    if given.as_json:
        costs = {f"{name}, {role}": cost for (name, role), cost in _costs(outcome).items()}
        print_json(summary(outcome) | {"median_cost": costs, "out": str(out), "report": str(report)})
    else:
        print_findings(outcome, report)
        print(f"Reconstructions are in {out}")


# ---- what was given ----------------------------------------------------------------------------------------


def _asked(given: AttackOptions, paths: list[Path]) -> tuple[Asked, list[str]]:
    """What is to be attacked and how, and lines on what was assumed."""
    captures = [Capture.load(path) for path in paths]
    truths = _truth_paths(given, paths)
    attack, told = _attack(given, scored=bool(truths))
    setting = CaptureSetting(
        model=given.model,
        shape=_shape(given.shape),
        classes=given.classes,
        defense=None if given.defense is None else Chain.of(given.defense),
    )
    settings = AuditSettings(link=given.link)
    experiment = Experiment(attack=(attack,), audit=settings, seed=given.seed, backend=given.backend)
    return Asked(captures, experiment, setting, truths or None, given.data, given.data_root), told


def _capture_paths(given: list[Path]) -> list[Path]:
    found = [inside for path in given for inside in capture_files(path)]
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


def _attack(given: AttackOptions, *, scored: bool) -> tuple[Attack, list[str]]:
    """The attack with its source of labels, and what was assumed on the way."""
    name, fields = parse_spec(given.attack)
    if given.labels is not None:
        if given.labels not in LABELS:
            raise unknown_name("source of labels", given.labels, LABELS)
        if "labels" in field_names(attacks.load(name)):
            fields["labels"] = given.labels
    made: Attack = attacks.build(name, **fields)
    if given.labels not in (None, made.labels_from):
        takes = f"always takes labels '{made.labels_from}'" if made.labels_from else "takes no labels"
        raise FedveilError(f"{name} {takes}: leave --labels out, or use inverting-gradients")
    if "labels" not in made.needs or scored:
        return made, []
    if "labels" in fields:
        raise FedveilError("labels 'known' needs the truths (--truth or --truths): use --labels recovered")
    return without_known_labels(made), ["no truth is given: the labels are read off the update"]


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or len(parts) != 3:
        raise FedveilError(f"--shape must be channels,height,width such as 1,28,28 (got '{text}')")
    return tuple(int(part) for part in parts)


def _command(given: AttackOptions) -> str:
    """The command line again, without where and how it shows what it found."""
    words = ["fedveil", "attack", *map(str, given.captures), "--attack", given.attack]
    for path in given.truth:
        words += ["--truth", str(path)]
    for name in ("truths", "model", "shape", "classes", "defense", "labels", "data", "data_root"):
        value = getattr(given, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words += [] if given.link else ["--no-link"]
    return shlex.join([*words, "--seed", str(given.seed), "--backend", given.backend])


# ---- what comes out ------------------------------------------------------------------------------------------


def _save_pictures(outcome: AuditResult, shop: CaptureShop, paths: list[Path], out: Path) -> None:
    """One PNG per image, in the order of the originals where these are known, and all images as tensors.

    Of text, the sentences of every update, a line each.
    """
    layout = shop.case.public.layout
    batches = (len(paths), shop.case.settings.batch_size, *layout.shape)
    found: dict[str, NDArray[np.float32]] = {
        role: pictures.reshape(batches) for (name, role), pictures in outcome.images.reconstructions.items() if name
    }
    if len(outcome.images.originals):
        found["original"] = outcome.images.originals.reshape(batches)
    for name, pictures in found.items():
        for path, batch in zip(paths, pictures, strict=True):
            folder = writable_folder(out / path.stem)
            if layout.text is not None:
                lines = [layout.text.text(torch.from_numpy(tokens)) for tokens in batch]
                write_atomically(folder / f"{name}.txt", "".join(f"{line}\n" for line in lines).encode())
                continue
            for place, picture in enumerate(batch):
                _save_png(folder / f"{name}-{place:03}.png", picture)
    tensors = dict(found)
    for finding in outcome.findings.values():
        for role, each in finding.items():
            if isinstance(each, Reconstruction):
                tensors[f"{role}.labels"] = each.labels.numpy()
                tensors[f"{role}.cost"] = each.cost.double().numpy()
    write_safetensors(out / "reconstructions.safetensors", tensors)


def _save_png(path: Path, picture: NDArray[np.float32]) -> None:
    values = (picture * 255).round().astype(np.uint8)
    if len(values) == 3:
        Image.fromarray(values.transpose(1, 2, 0)).save(path)
    else:  # one gray channel; of other numbers of channels, the first
        Image.fromarray(values[0]).save(path)


def _costs(outcome: AuditResult) -> dict[tuple[str, str], float]:
    """The median matching cost of every attack and role that rebuilds anything."""
    return {
        (name, role): float(each.cost.median())
        for name, roles in outcome.findings.items()
        for role, each in roles.items()
        if isinstance(each, Reconstruction)
    }
