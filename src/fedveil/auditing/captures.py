"""`attack`: attack updates that were captured, by fedveil's own training or elsewhere, and judge what leaked.

The stages are those of an audit from `fit` on, kept in the same store.
"""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from torch import nn
from torch.nn import functional

from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Finding
from fedveil.auditing.attackers import threat_of_row, threats_of
from fedveil.auditing.attacking import Shown, attacked, scene_of, scenes_by_role, scored
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.candidates import truth_of
from fedveil.auditing.capture_checks import CaptureSetting
from fedveil.auditing.capture_report import configuration, described, hashes, promise, unjudged
from fedveil.auditing.capture_shop import Asked, CaptureShop
from fedveil.auditing.capture_truth import Data, OneTruth
from fedveil.auditing.evidence import run_of, scores_without_attack
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.forecast import attack_line
from fedveil.auditing.judgment import Terms
from fedveil.auditing.provenance import provenance
from fedveil.auditing.result import AttackRun, Cost, Images, Result, Row, TextLegend
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import RoleScore, images_of, make_row, rows_of, score_unknown
from fedveil.auditing.sentences import at_most
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.auditing.verdict import judge
from fedveil.clients.engine import Backend, Loss
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import ONE_EXAMPLE
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.federation.observers import Watch
from fedveil.federation.progress import watch_with
from fedveil.leakage.truths import Truths
from fedveil.ledger.picking import most_picked
from fedveil.progress import Meter, style_for
from fedveil.tasks.normalization import Normalization
from fedveil.workers import Workers, opened

Captures = Capture | Path | str | Sequence[Capture | Path | str]


def attack(
    captures: Captures,
    attack: Attack | str | Sequence[Attack | str] = "inverting-gradients",
    *,
    model: nn.Module | str | None = None,
    loss: Loss = functional.cross_entropy,
    defense: Defense | Chain | Sequence[Defense] | str | None = None,
    truth: OneTruth | Sequence[OneTruth] | None = None,
    data: Data | None = None,
    normalization: Normalization | None = None,
    shape: tuple[int, ...] | None = None,
    classes: int | None = None,
    settings: AuditSettings | None = None,
    seed: int = 0,
    backend: Backend = "auto",
    store: Store | Path | str | None = None,
    workers: int | Workers = 1,
    progress: bool | None = None,
) -> AuditResult:
    """Attack captured updates, and judge what leaked if it is told what was behind them.

    captures: one or several, or their files, or a folder of files; of one model and one kind, with equal batch sizes.
    model, loss, normalization, shape, classes: what the attacker knows. What a capture tells itself may be left out.
    defense: what the adaptive attacker takes the defense to be, if the capture does not tell; "none" if there is none.
    truth: what was behind each update, `(inputs, targets)` as the model took them, a `Truth` or its file: for scoring,
        and for attacks that are told the labels. Without it these read the labels off the update.
    data: other examples of the same kind, to tell the right ones from: a data set's name, `(inputs, labels)` as the
        model takes them, or a `Task`. Truth and data together give a verdict, and the link test.
    settings: how to judge. The number of updates, their batch size and rounds are those of the captures.
    store, workers, progress: as in `fedveil.audit`.

    `findings` of the result has what each attack found, by its name and role.
    """
    experiment = Experiment(
        attack=attack if isinstance(attack, list | tuple) else (attack,),
        audit=settings or AuditSettings(),
        seed=seed,
        backend=backend,
    )
    supposed = None if defense is None else Chain.of(defense)
    setting = CaptureSetting(model, loss, shape, normalization, classes, supposed)
    with ExitStack() as stack:
        pool = stack.enter_context(opened(workers))
        shop = CaptureShop.open(Asked(read_captures(captures), experiment, setting, truth, data), Store.of(store), pool)
        for line in shop.warnings():
            warnings.warn(line, stacklevel=2)
        watch = watch_with(stack.enter_context(Meter(style_for(progress))))
        return attack_captures(shop, watch, "fedveil.attack(...) with the configuration below")


def read_captures(given: Captures) -> list[Capture]:
    """Captures from whatever names them."""
    found: list[Capture] = []
    for each in [given] if isinstance(given, Capture | Path | str) else list(given):
        if isinstance(each, Capture):
            found.append(each)
        elif isinstance(each, Path | str):
            found += [Capture.load(path) for path in capture_files(Path(each))]
        else:
            raise FedveilError(f"captures must be Capture objects or their files, not {type(each).__name__}")
    return found


def capture_files(path: Path) -> list[Path]:
    """The file itself, or those in a folder."""
    inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not inside:
        raise FedveilError(f"{path} holds no capture (*.safetensors)")
    return inside


# ---- the stages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CaptureEvidence:
    """What attacks on captures found, and what it is worth."""

    truths: Truths | None  # where it is known what was behind the updates
    scores: list[RoleScore]
    runs: list[AttackRun]
    findings: dict[str, dict[Role, Finding]]  # by attack and role

    @property
    def among(self) -> int:
        """The candidates from which the right one is picked; 0 where there are none."""
        return 0 if self.truths is None or self.truths.distractors is None else self.truths.distractors.shape[1] + 1


def attack_captures(shop: CaptureShop, watch: Watch, command: str) -> AuditResult:
    """Attack captures that were checked, score and judge what was found."""
    started, begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.perf_counter()
    case, (promised, exposure) = shop.case, promise(shop)
    one_example = any(guarantee.protects == ONE_EXAMPLE for _, guarantee in promised.holding)
    evidence = gather(shop, watch, one_example=one_example)
    among = evidence.among
    most = most_picked(promised, exposure, among) if among else None
    rows, images = _rows(shop, evidence, most), _images(shop, evidence)
    legend = case.modality.pieces([images.originals, *images.reconstructions.values()])
    terms = Terms(case.settings, case.modality, among, uninformed=tuple(shop.known.chain.without_knowledge))
    if among:
        verdict = judge(rows, Cost(), promised.sentence + at_most(most, among), terms)
    else:
        verdict = unjudged(terms, promised.sentence, scored=evidence.truths is not None)
    result = Result(
        **described(shop, promised, among),
        modality=case.modality.name,
        text=None if legend is None else TextLegend(**legend),
        verdict=verdict,
        rows=rows,
        cost=Cost(),
        attacks=evidence.runs,
        provenance=provenance(
            command=command,
            config=configuration(shop),
            seed=case.seed,
            hashes=hashes(shop),
            started=started,
            seconds=time.perf_counter() - begun,
        ),
    )
    return AuditResult(result, images, evidence.findings)


def gather(shop: CaptureShop, watch: Watch, *, one_example: bool) -> CaptureEvidence:
    """Fit, attack in every role, and score as far as the truth is known."""
    case, chain, originals = shop.case, shop.known.chain, shop.originals
    truths = candidates = None
    if originals is not None and shop.held_out is not None:
        found = truth_of(case, originals, shop.held_out, one_example=one_example)
        truths, candidates = found.truths, found.candidates
    elif originals is not None:
        rounds = (originals.round,) * len(originals.labels)
        truths = Truths(originals.inputs, originals.labels, originals.seen, rounds)
    shown = Shown(shop.updates, None if originals is None else originals.labels, candidates, shop.captures[0].round)
    evidence = CaptureEvidence(truths, [], [], {})
    for attack in shop.attacks:
        if watch.stage:
            watch.stage(attack_line(attack.name))
        scenes = scenes_by_role(scene_of(case, attack, shown), chain, None, case.settings.attackers)
        reached = attacked(case, attack, scenes, shop.auxiliary, watch.attack)
        evidence.findings[attack.name] = {role: each.finding for role, each in reached.items()}
        if truths is not None:
            own = scored(case, attack, reached, truths)
        else:
            own = [score_unknown(attack.name, role, each.finding, case.modality) for role, each in reached.items()]
        evidence.runs.append(run_of(attack, own, truths or _Counted.of(shop)))
        evidence.scores.extend(own)
    if truths is not None:
        evidence.scores.extend(scores_without_attack(case, chain, truths))
    return evidence


def _rows(shop: CaptureShop, evidence: CaptureEvidence, bound: float | None) -> list[Row]:
    threats = threats_of(shop.attacks, shop.auxiliary, evidence.among)
    if evidence.truths is not None:
        return rows_of(evidence.scores, evidence.truths, shop.case.modality, bound=bound, threats=threats)
    groups = _Counted.of(shop).groups
    return [
        make_row(each.attack, each.role, each.values, groups).model_copy(
            update={"threat": threat_of_row(each.attack, each.role, threats)}
        )
        for each in evidence.scores
    ]


def _images(shop: CaptureShop, evidence: CaptureEvidence) -> Images:
    if evidence.truths is not None:
        return images_of(evidence.scores, evidence.truths, shop.case.modality)
    made = Images(np.empty((0, *shop.case.public.layout.shape), np.float32), np.empty(0, np.int64))
    for each in evidence.scores:
        if each.exhibit is not None:
            made.reconstructions[(each.attack, each.role)] = each.exhibit.numpy()
    return made


@dataclass(frozen=True)
class _Counted:
    """Which update every example belongs to, where nothing else is known of them."""

    updates: int
    examples: int  # behind each

    @classmethod
    def of(cls, shop: CaptureShop) -> Self:
        return cls(len(shop.captures), shop.case.settings.batch_size)

    @property
    def rounds(self) -> tuple[int, ...]:
        return (1,) * self.updates

    @property
    def groups(self) -> list[int]:
        return [place // self.examples for place in range(self.updates * self.examples)]
