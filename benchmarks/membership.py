"""Who was a member: 500 MNIST images learned by heart, and updates of batches of 8, without a defense and under some.

The model rows look at the model after training, the update rows at updates of the untrained model. Left out without the
files of MNIST.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import fedveil as fv
from benchmarks.tables import Table
from fedveil.auditing.result import Row
from fedveil.errors import FedveilError
from fedveil.tasks.definition import trained_on

IMAGES = 500
VICTIMS = 16
BATCH = 8
OTHERS = 1000
FEDSGD = fv.FederationSettings(rounds=60, batch_size=8, lr=0.1, evaluate_every=60)
FEDAVG = fv.FederationSettings(protocol="fedavg", rounds=30, batch_size=8, lr=0.1, local_epochs=2, evaluate_every=30)
CASES = [
    ("none", FEDSGD),
    ("gradient-dropout:keep=0.6", FEDSGD),
    (f"gaussian-noise:sigma={16 / 255:.4f}", FEDSGD),
    ("dp-sgd:noise_multiplier=1,clip=1", FEDSGD),
    ("spm:epsilon=0.3", FEDAVG),
]
TESTS = ["update-alignment", "fedmia", "loss-threshold", "lira:references=8"]


def measure() -> Iterator[list[Table]]:
    table = Table(
        f"Members told from {OTHERS:,} others, mlp on {IMAGES} MNIST images",
        ["defense", "test", "attacker", "AUC", "found at 1 % false alarms", "formal bound on that"],
        f"Updates: {VICTIMS} of {BATCH} images at the untrained model. Model: after {FEDSGD.rounds} rounds of FedSGD "
        f"({FEDAVG.rounds} of FedAvg under SPM), {IMAGES} members. Means with 95 % intervals.",
    )
    task = overfitted()
    for spec, federation in CASES if task is not None else ():
        assert task is not None
        begun = time.perf_counter()
        found = fv.audit(
            task,
            spec,
            TESTS,
            federation=federation,
            settings=fv.AuditSettings(
                victims=VICTIMS, batch_size=BATCH, nonmembers=OTHERS, link=False, reference="none"
            ),
        )
        for row in found.result.rows:
            if row.question == "member" and (spec == "none" or row.role in ("naive", "adaptive")):
                table.add(spec, row.attack, WHO[row.role], *cells(row))
        print(f"{spec}: {time.perf_counter() - begun:.0f} s", flush=True)
        yield [table]


WHO = {"ceiling": "no defense", "naive": "does not know it", "adaptive": "knows it", "noise-floor": "floor: noise"}


def cells(row: Row) -> list[str]:
    auc, share, most = row.metrics["member_auc"], row.metrics.get("member_tpr_1"), row.bounds.get("member_tpr_1")
    return [
        f"{auc.mean:.2f} [{auc.low:.2f}, {auc.high:.2f}]",
        "not measured"
        if share is None
        else f"{100 * share.mean:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]",
        "–" if most is None else f"≤ {100 * most:.0f} %",
    ]


def overfitted() -> fv.Task | None:
    """A few training images and all test images."""
    try:
        few, whole = (fv.task("mnist", model="mlp", limit=limit) for limit in (IMAGES, None))
    except FedveilError as error:
        print(f"mnist is left out: {error}")
        return None
    return trained_on(whole, few.train, few.clients)
