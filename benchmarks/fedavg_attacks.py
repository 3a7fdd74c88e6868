"""What attackers make of FedAvg updates: pictures behind several local steps, and the labels behind many.

Pictures: the attacker takes the change of the weights for one gradient, or repeats the local steps and looks for the
order of the examples, which clients shuffle in every epoch. Labels: read off as if the update were one gradient, or by
least squares over the steps. The digits that come with scikit-learn; rows of MNIST are left out without its files.
Goes on from the rows of before.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedveil as fv
from benchmarks.tables import STORE, Table, measured
from fedveil.attacks.labels import recover_labels, whole_counts
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import LocalSteps, Public, Scene
from fedveil.auditing.audit_result import AuditResult
from fedveil.defenses.updates import Updates
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.layout import Layout
from fedveil.tree import Tree

VICTIMS = 4
EXAMPLES = 4
CLIENTS = 12  # whose labels are looked for, in every row


@dataclass(frozen=True)
class Case:
    """The local training behind some updates."""

    words: str
    data: str
    epochs: int
    batch: int
    lr: float = 0.1
    momentum: float = 0.0


CASES = [
    Case("1 epoch of 1 step", "digits", 1, 4),
    Case("1 epoch of 4 steps", "digits", 1, 1),
    Case("4 epochs of 2 steps", "digits", 4, 2),
    Case("4 epochs of 2 steps", "digits", 4, 2, momentum=0.9),
    Case("4 epochs of 2 steps", "mnist", 4, 2, lr=0.1),
    Case("4 epochs of 2 steps", "mnist", 4, 2, lr=0.02),
    Case("1 epoch of 2 steps", "mnist", 1, 2, lr=0.1),
    Case("4 epochs of 2 steps", "mnist", 4, 2, lr=0.05),
]


# How the pictures are looked for, and with which attack.
INVERTING = "inverting-gradients:steps=100,restarts=1,signed=false"
HOW = {
    "pseudo-gradient": ("pseudo-gradient", INVERTING),
    "unrolled": ("unrolled", INVERTING),
    "unrolled, from a generator": ("unrolled", "latent-start:pixel_steps=100"),
}


def measure() -> Iterator[list[Table]]:
    kept = measured("fedavg-attacks")
    counts = kept[1] if len(kept) > 1 else labels()
    for table in pictures(kept[0] if kept else None):
        yield [table, counts]


def task_of(data: str, model: str) -> fv.Task | None:
    try:
        return fv.task(data, model=model, limit=2000)
    except FedveilError as error:
        print(f"{data} is left out: {error}")
        return None


# ---- pictures ------------------------------------------------------------------------------------------------


def pictures(table: Table | None) -> Iterator[Table]:
    table = table or Table(
        f"FedAvg updates, untrained LeNet, {VICTIMS} clients of {EXAMPLES} pictures",
        ["data", "local training", "rate", "momentum", "attacked as", "PSNR (dB)", "identified among 100"],
    )
    table.note = (
        "Mean with its 95 % interval over pictures. Clients shuffle every epoch; the attacker has sorted labels. "
        + "; ".join(f"{how}: `{attack}`" for how, (_, attack) in HOW.items())
        + "."
    )
    for case in CASES:
        task = task_of(case.data, "lenet")
        for how in HOW if task is not None and case.data == "mnist" else [*HOW][:2]:
            cell = [case.data, case.words, f"{case.lr:g}", f"{case.momentum:g}", how]
            if task is None or cell in [row[:5] for row in table.rows]:
                continue
            begun = time.perf_counter()
            found = audited(task, case, how)
            psnr, share = found.leakage["ceiling", "psnr"], found.leakage["ceiling", "identified"]
            table.add(
                *cell,
                f"{psnr.mean:.1f} [{psnr.low:.1f}, {psnr.high:.1f}]",
                f"{100 * share.mean:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]",
            )
            print(f"{table.rows[-1]}: {time.perf_counter() - begun:.0f} s", flush=True)
            yield table


def audited(task: fv.Task, case: Case, how: str) -> AuditResult:
    steps, attack = HOW[how]
    return fv.audit(
        task,
        None,
        attack,
        federation=fv.FederationSettings(
            protocol="fedavg",
            batch_size=case.batch,
            local_epochs=case.epochs,
            lr=case.lr,
            momentum=case.momentum,
        ),
        settings=fv.AuditSettings(
            victims=VICTIMS,
            batch_size=EXAMPLES,
            source="test",
            link=False,
            reference="none",
            local_steps=steps,  # type: ignore[arg-type]
            auxiliary="held-out" if case.data == "digits" else case.data,
        ),
        train=False,
        store=STORE,
    )


# ---- labels --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """A client's local round."""

    examples: int
    batch: int
    epochs: int
    lr: float
    momentum: float = 0.0

    def __str__(self) -> str:
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        return f"{self.examples} examples, {self.epochs} × {self.examples // self.batch} steps of {self.lr:g}{momentum}"


ROUNDS = [
    Rounds(8, 4, 1, 0.1),
    Rounds(8, 4, 10, 0.01),
    Rounds(8, 4, 10, 0.1),
    Rounds(32, 8, 10, 0.1),
    Rounds(32, 8, 3, 0.1, momentum=0.9),
]


def labels() -> Table:
    table = Table(
        f"Labels behind FedAvg updates, {CLIENTS} clients in every cell",
        ["data", "model", "local round", "mix", "guess", "read off", "least squares"],
        "Share of labels found, repeats counted. Untrained / after 600 steps of training. Skewed: three classes of 60, "
        "30 and 10 %. The guess is equal shares of all classes; the read-off takes the update for one gradient.",
    )
    for data, name in (("digits", "lenet"), ("digits", "mlp"), ("mnist", "lenet"), ("mnist", "mlp")):
        task = task_of(data, name)
        if task is None:
            continue
        models = [task.model, grown(task)]
        for local in ROUNDS:
            for mix in ("uniform", "skewed"):
                found = [rates(task, model, local, mix) for model in models]
                guess, read, squares = ([f"{each:.2f}" for each in way] for way in zip(*found, strict=True))
                table.add(data, name, local, mix, guess[0], " / ".join(read), " / ".join(squares))
    return table


def grown(task: fv.Task, steps: int = 600) -> nn.Module:
    """The model after some training."""
    model, generator = copy.deepcopy(task.model), torch.Generator().manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        inputs, targets = task.train.batch(torch.randint(len(task.train), (32,), generator=generator))
        step(model, optimizer, inputs, targets)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: object, targets: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def rates(task: fv.Task, model: nn.Module, local: Rounds, mix: str) -> tuple[float, float, float]:
    """The share of labels found by a guess, by the read-off and by least squares."""
    generator = torch.Generator().manual_seed(2024)
    truth, sent = [], []
    for _ in range(CLIENTS):
        places = drawn(torch.as_tensor(task.test.labels), local.examples, mix, generator)
        inputs, targets = task.test.batch(places)
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=local.lr, momentum=local.momentum)
        for _ in range(local.epochs):
            for batch in torch.randperm(local.examples, generator=generator).split(local.batch):
                step(own, optimizer, inputs[batch], targets[batch])  # type: ignore[index]
        truth.append(targets)
        sent.append({name: p.detach() for name, p in own.named_parameters()})
    problem = problem_of(task, model, local, Tree.stack(sent))
    even = torch.full((10,), local.examples / 10, dtype=torch.float64)
    guess = whole_counts(even, torch.zeros(10, dtype=torch.bool), local.examples).expand(CLIENTS, -1)
    ways = guess, recover_labels(replace(problem, behind=None)), recover_labels(problem)
    one, two, three = (share(way, torch.stack(truth)) for way in ways)
    return one, two, three


def drawn(known: Tensor, count: int, mix: str, generator: torch.Generator) -> Tensor:
    if mix == "uniform":
        return torch.randint(len(known), (count,), generator=generator)
    classes = torch.randperm(10, generator=generator)[:3]
    parts = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), count, replacement=True, generator=generator)
    pools = [(known == wanted).nonzero().flatten() for wanted in classes[parts].tolist()]
    return torch.stack([pool[torch.randint(len(pool), (), generator=generator)] for pool in pools])


def problem_of(task: fv.Task, model: nn.Module, local: Rounds, sent: Tree) -> Problem:
    """What an attacker has who was sent the weights."""
    assert task.normalization is not None
    steps = local.epochs * (local.examples // local.batch)
    updates = Updates(
        kind="weights",
        before=Tree.expand({name: p.detach() for name, p in model.named_parameters()}, sent.count),
        message=sent,
        buffers=Tree({}),
        lr=(local.lr,) * steps,
        batch_sizes=(local.batch,) * steps,
        momentum=local.momentum,
        local_epochs=local.epochs,
    )
    layout = Layout("pictures", task.shape, task.normalization.box())
    scene = Scene(Public(model, task.loss, layout, task.classes), updates, Streams.seeded(0, range(sent.count)))
    problem = Problem.of(scene)
    assert problem.behind == LocalSteps.of(updates)
    return problem


def share(found: Tensor, truth: Tensor) -> float:
    ours, theirs = (functional.one_hot(each, 10).sum(1) for each in (found, truth))
    return float(torch.minimum(ours, theirs).sum() / truth.numel())
