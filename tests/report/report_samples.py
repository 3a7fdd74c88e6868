"""Results as an audit would give them, made up: a full one, a bare one and a hostile one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedveil.auditing.judgment import Terms
from fedveil.auditing.result import (
    Answer,
    Assumption,
    AttackRun,
    Cost,
    CostCurve,
    DefenseCard,
    Estimate,
    Images,
    Provenance,
    Result,
    RoundUtility,
    Row,
    Verdict,
    Warned,
)
from fedveil.auditing.roles import Role
from fedveil.auditing.scoring import worst_case
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.verdict import judge
from fedveil.leakage.modalities import modality
from fedveil.leakage.truths import Truths
from fedveil.tasks.client_labels import ClientLabels

Pictures = NDArray[np.float32]
CLASSES = ["t-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
CONFIG = {
    "task": {"name": "fashion-mnist", "model": "lenet", "clients": 4, "split": "own", "seed": 7},
    "defense": [{"name": "gradient-dropout", "keep": 0.8, "sigma": 0.005}],
    "attack": [{"name": "inverting-gradients", "steps": 2000, "restarts": 2}],
    "federation": {"rounds": 30, "train": True},
    "audit": {"victims": 32},
    "seed": 7,
}
HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>{{ 7*7 }}"


def digits(count: int, side: int = 28) -> tuple[Pictures, NDArray[np.int64]]:
    """Handwritten digits of scikit-learn, enlarged to look like MNIST."""
    from sklearn.datasets import load_digits

    data = load_digits()
    scaled = [Image.fromarray((one * 15.9).astype(np.uint8)).resize((side, side), 3) for one in data.images[:count]]
    return np.stack([np.asarray(one, dtype=np.float32)[None] / 255 for one in scaled]), data.target[:count]


def estimate(values: list[float]) -> Estimate:
    """A mean with a normal interval: near enough to a bootstrap for a sample."""
    kept = np.array(values, dtype=float)
    spread = 1.96 * kept.std() / math.sqrt(len(kept)) if len(kept) else math.nan
    mean = float(kept.mean()) if len(kept) else math.nan
    return Estimate(mean=mean, low=mean - spread, high=mean + spread, count=len(kept))


def share(values: list[float]) -> Estimate:
    """A share with Wilson's interval."""
    n, p, z = len(values), float(np.mean(values)), 1.96
    center, half = (p + z * z / (2 * n)) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    half /= 1 + z * z / n
    return Estimate(mean=p, low=max(center - half, 0.0), high=min(center + half, 1.0), count=n)


def row(attack: str, role: Role, originals: Pictures, pictures: Pictures, chance: float, **more: Any) -> Row:
    """A row of numbers for pictures; those above 13 dB count as identified, the others by luck."""
    rng = np.random.default_rng(len(role))
    mse = ((pictures - originals) ** 2).reshape(len(originals), -1).mean(axis=1)
    psnr = -10 * np.log10(np.maximum(mse, 1e-9))
    values: dict[str, list[float]] = {
        "identified": [float(one > 13 or rng.random() < chance) for one in psnr],
        "mse": (mse * 10).tolist(),
        "psnr": (psnr - 10).tolist(),
        "mse_pixel": mse.tolist(),
        "psnr_pixel": psnr.tolist(),
        "ssim": np.clip(1 - 8 * mse, -0.02, 1).tolist(),
        "leakage_score": (1 - mse * 2).tolist(),
        "rdlv": (0.2 - mse * 3).tolist(),
    }
    if attack:
        values["attack_loss"] = (mse / 5 + 1e-4).tolist()
    metrics = {name: share(each) if name == "identified" else estimate(each) for name, each in values.items()}
    return Row(attack=attack, role=role, metrics=metrics, values=values, **more)


LINKED: dict[Role, float] = {"ceiling": 1.0, "naive": 0.5, "adaptive": 0.94, "noise-floor": 0.0}


def links(count: int, *, bound: float | None = 0.3612, shares: dict[Role, float] | None = None) -> list[Row]:
    """A link test that finds more than the pictures show."""
    rows = []
    for role, part in (shares or LINKED).items():
        values = [float(place < round(part * count)) for place in range(count)]
        allowed = bound if role in ("naive", "adaptive") else None
        rows.append(
            Row(
                attack="link",
                role=role,
                question="link",
                metrics={"linked": share(values)},
                values={"linked": values},
                strongest=role == "adaptive",
                bound=allowed,
                exact=role != "naive",
            )
        )
    return rows


def terms(**audit: Any) -> Terms:
    """What these results are judged by."""
    return Terms(AuditSettings(**audit), modality("pictures"), 100, CONFIG)


def together(rows: list[Row], count: int) -> list[Row]:
    """The worst case over several attacks."""
    nothing = torch.zeros(count, 1)
    return worst_case(rows, Truths(nothing, nothing, nothing, (1,) * count), modality("pictures"))


def curve(attack: str, role: Role, floor: float, steps: int = 2000) -> CostCurve:
    """A cost that falls from about 1 to a floor."""
    at = list(range(0, steps + 1, max(1, steps // 80)))
    median = [floor + (1 - floor) * math.exp(-6 * step / steps) for step in at]
    return CostCurve(
        attack=attack,
        role=role,
        steps=at,
        median=median,
        low=[0.7 * one for one in median],
        high=[1.4 * one for one in median],
    )


def held(clients: int, labels: list[str], alpha: float, examples: int = 54_000) -> ClientLabels:
    """Labels that lie over the clients as a Dirichlet distribution has it."""
    rng = np.random.default_rng(clients)
    counts = np.stack([rng.multinomial(examples // len(labels), rng.dirichlet([alpha] * clients)) for _ in labels], 1)
    counts[counts.sum(1) == 0, 0] = 1
    sizes = counts.sum(1).tolist()
    return ClientLabels(labels=labels, sizes=sizes, counts=counts.tolist(), partition=f"dirichlet:alpha={alpha}")


def card(**more: Any) -> DefenseCard:
    """Gradient dropout."""
    fields: dict[str, Any] = {
        "name": "gradient-dropout",
        "settings": {"keep": 0.8, "sigma": 0.005, "at": "step"},
        "spelled": "gradient-dropout:keep=0.8,sigma=0.005",
        "summary": "Keeps a random part of every gradient, scaled up, and replaces the rest by random decoys. "
        "The mean of the gradient stays the same.",
        "acts_on": "the gradient of every step",
        "guarantee": "None. The defense obscures the gradient; it bounds nothing.",
        "formal": False,
        "weaknesses": [
            "Decoys of a size unlike the gradient's can be told apart and left out.",
            "Averaging over rounds removes the decoys.",
        ],
        "paper": "Sotthiwat et al., Gradient Dropout. https://example.org/paper.pdf",
        "facts": {"cosine to the true gradient": "0.84", "entries replaced": "20.0 %"},
    }
    return DefenseCard(**(fields | more))


def provenance(**more: Any) -> Provenance:
    """A run on some machine."""
    fields: dict[str, Any] = {
        "command": "fedveil audit --data fashion-mnist --model lenet --clients 4 --defense "
        "gradient-dropout:keep=0.8,sigma=0.005 --attack inverting-gradients --images 32 --seed 7",
        "config": CONFIG,
        "seed": 7,
        "versions": {"fedveil": "0.1.0", "python": "3.11.2", "torch": "2.6.0", "numpy": "1.26.4"},
        "machine": "Linux x86-64, 2 cores, 8 GB; no GPU",
        "hashes": {"data": "9f86d081" * 8, "model": "60303ae2" * 8},
        "started": "2025-05-01T12:34:56+00:00",
        "seconds": 192.4,
    }
    return Provenance(**(fields | more))


def full(attacks: tuple[str, ...] = ("inverting-gradients",), count: int = 32) -> tuple[Result, Images]:
    """All roles, a link test, training, a history, curves."""
    rng = np.random.default_rng(0)
    originals, labels = digits(count)
    images = Images(originals, labels)
    mean = np.broadcast_to(originals.mean(axis=0), originals.shape).astype(np.float32)
    rows = []

    def add(attack: str, role: Role, pictures: Pictures, chance: float = 0.02, **more: Any) -> None:
        pictures = np.clip(pictures, 0, 1).astype(np.float32)
        images.reconstructions[(attack, role)] = pictures
        rows.append(row(attack, role, originals, pictures, chance, **more))

    def noise(scale: float | NDArray[np.float64]) -> Pictures:
        return (scale * rng.standard_normal(originals.shape)).astype(np.float32)

    each = rng.uniform(0.1, 0.6, (count, 1, 1, 1))
    for i, attack in enumerate(attacks):
        add(attack, "ceiling", originals + noise(0.06))
        add(attack, "naive", 0.3 * originals + 0.3 + noise(0.4))
        add(attack, "adaptive", (0.75 - 0.2 * i) * originals + 0.1 + noise(each), strongest=i == 0)
        add(attack, "noise-floor", 0.4 + noise(0.35))
    add("", "mean-floor", mean)
    add("", "bound", originals + noise(0.03))
    rows += [*together(rows, count), *links(count, bound=None)]

    history = [
        RoundUtility(
            round=i,
            undefended=0.1 + 0.76 * (1 - math.exp(-i / 6)),
            defended=0.1 + 0.75 * (1 - math.exp(-i / 8)),
        )
        for i in range(31)
    ]
    cost = Cost(
        rounds=30,
        defended=Estimate(mean=0.832, low=0.825, high=0.839, count=10000),
        undefended=Estimate(mean=0.855, low=0.848, high=0.862, count=10000),
        difference=Estimate(mean=-0.023, low=-0.028, high=-0.018, count=10000),
        history=history,
        seconds_per_round={"defended": 0.103, "undefended": 0.1},
        slowdown=1.03,
        slowdown_interval=Estimate(mean=1.03, low=0.97, high=1.08, count=29),
        chance=0.1,
        majority=0.1,
        bytes_per_round={"up": 246824, "down": 246824},
    )
    result = Result(
        data="fashion-mnist",
        model="lenet",
        protocol="FedSGD, 4 clients, batch 8",
        attacked=f"{count} updates of one image each, at the untrained model",
        label_names=CLASSES,
        holdings=held(4, ["t-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "bag"], 0.5),
        defense=card(),
        verdict=judge(rows, cost, "Formal guarantee: none.", terms(victims=count)),
        rows=rows,
        candidates=100,
        cost=cost,
        attacks=[
            AttackRun(
                attack=attack,
                settings={"cost": "cosine", "tv": 1e-4, "lr": 0.1, "signed": True, "schedule": [750, 1250, 1750]},
                seconds=143.2,
                restarts=2,
                steps=2000,
                victims=count,
                batch_size=1,
                label_recovery=share([1.0] * (count - 1) + [0.0]),
                on_the_way={
                    "ceiling": {"ssim": {mark: share([1.0] * count) for mark in ("1/3", "2/3", "all")}},
                    "adaptive": {"ssim": {"1/3": share([0.0] * count), "all": share([1.0] * count)}},
                },
                curves=[
                    curve(attack, "ceiling", 0.002),
                    curve(attack, "naive", 0.11),
                    curve(attack, "adaptive", 0.03),
                    curve(attack, "noise-floor", 0.12),
                ],
            )
            for attack in attacks
        ]
        + [AttackRun(attack="link", question="link", settings={}, seconds=1.9, victims=count, batch_size=1)],
        assumptions=[
            Assumption(switch="server", setting="honest but curious", words="The server keeps to the protocol."),
            Assumption(switch="labels", setting="read off", words="The attacker reads the labels off the last layer."),
            Assumption(
                switch="batch", setting="1 image", words="An update is the gradient of one image: the worst case."
            ),
        ],
        not_given=["the images or others of the same clients", "the client's random seed"],
        not_tried=["attacks that combine several rounds", "attacks with a generative prior", "a malicious server"],
        provenance=provenance(),
    )
    return result, images


def bare() -> tuple[Result, Images]:
    """One image of 8 × 8 pixels, one attacker, no training, no adaptive row, a mean that is not a number."""
    originals, labels = digits(1, side=8)
    images = Images(originals, labels)
    images.reconstructions[("dlg", "ceiling")] = originals
    images.reconstructions[("dlg", "naive")] = np.full_like(originals, np.nan)
    one = Estimate(mean=1.0, low=1.0, high=1.0, count=1)
    lost = Estimate(mean=math.nan, low=math.nan, high=math.nan, count=1)
    ceiling = Row(
        attack="dlg",
        role="ceiling",
        metrics={"identified": one, "psnr": one.model_copy(update={"mean": math.inf, "high": math.inf})},
        values={"identified": [1.0], "psnr": [math.inf]},
    )
    naive = Row(
        attack="dlg",
        role="naive",
        metrics={"identified": one.model_copy(update={"mean": 0.0, "low": 0.0}), "psnr": lost},
        values={"identified": [0.0], "psnr": [math.nan]},
        strongest=True,
    )
    result = Result(
        data="digits",
        model="mlp",
        protocol="FedSGD, 1 client, batch 1",
        defense=card(paper="", facts={}, weaknesses=[], settings={}),
        verdict=Verdict(
            status="not judged",
            sentences=["One image was attacked: too few to judge.", "Cost: not measured.", "Formal guarantee: none."],
            why="The undefended attack does not beat the floor, or no floor was measured.",
        ),
        rows=[naive, ceiling],
        candidates=10,
        cost=Cost(),
        attacks=[
            AttackRun(
                attack="dlg",
                settings={},
                seconds=0.8,
                restarts=0,
                steps=1,
                victims=1,
                batch_size=1,
                curves=[
                    CostCurve(attack="dlg", role="naive", steps=[0], median=[math.nan], low=[math.nan], high=[math.inf])
                ],
            )
        ],
        assumptions=[],
        not_given=[],
        not_tried=[],
        provenance=provenance(hashes={}, versions={}, config={}),
    )
    return result, images


def hostile() -> tuple[Result, Images]:
    """Markup in every text, very long words, color images with 5 channels, several attacks with long names."""
    result, images = full(("inverting-gradients", "an-attack-with-a-name-" + "longer-than-any-" * 6), count=12)
    long = HOSTILE + " " + "unbreakable" * 30
    attacks = [
        run.model_copy(update={"settings": {HOSTILE: [long, None, True, {"deep": math.inf}]}}) for run in result.attacks
    ]
    result = result.model_copy(
        update={
            "data": HOSTILE,
            "model": "m" * 120,
            "protocol": long,
            "holdings": held(500, [f"{HOSTILE} {number}" for number in range(100)], 0.1),
            "defense": card(
                name=long,
                spelled="chain(" + "dp-gaussian:epsilon=1.0+" * 20 + ")" + HOSTILE,
                settings={HOSTILE: long},
                summary=long,
                weaknesses=[long],
                paper=f'"Paper" https://example.org/{"x" * 200}"onmouseover="alert(1) javascript:alert(1)',
                facts={HOSTILE: long},
            ),
            "verdict": Verdict(
                status="exposed",
                sentences=[long, long, HOSTILE],
                why=long,
                warnings=[Warned(words=long, loud=True)],
                answers=[
                    Answer(question="reconstruct", asked=HOSTILE, status="exposed", why=long, sentence=long),
                    Answer(question="link", asked=long, status="not judged", why=long, next_step=HOSTILE),
                ],
                notes=[long],
                thresholds=[HOSTILE],
                next_step=long,
                command=long,
            ),
            "attacked": long,
            "label_names": [HOSTILE] * 10,
            "attacks": attacks,
            "assumptions": [Assumption(switch=HOSTILE, setting=long, words=long)],
            "not_given": [long],
            "not_tried": [HOSTILE],
            "provenance": provenance(
                command="fedveil audit " + "--option=" + "v" * 300 + HOSTILE,
                config={HOSTILE: {"deep": [long]}},
                versions={HOSTILE: long},
                machine=long,
                hashes={HOSTILE: long},
                started=HOSTILE,
            ),
        }
    )
    colored = Images(np.repeat(images.originals, 5, axis=1), images.labels)
    for key, pictures in images.reconstructions.items():
        colored.reconstructions[key] = np.repeat(pictures, 5, axis=1)
    return result, colored


def large(side: int = 224, count: int = 8) -> tuple[Result, Images]:
    """The full one with few pictures, enlarged: noise is then in coarse grains, which compress."""
    result, images = full(count=count)

    def enlarged(pictures: Pictures) -> Pictures:
        grown = pictures.repeat(-(-side // 28), axis=2).repeat(-(-side // 28), axis=3)
        return grown[:, :, :side, :side]

    found = Images(enlarged(images.originals), images.labels)
    for key, pictures in images.reconstructions.items():
        found.reconstructions[key] = enlarged(pictures)
    return result, found


SAMPLES = {"full": full, "bare": bare, "hostile": hostile, "large": large}
