"""What leaks of sentences: CoLA under a real encoder, with the gradients of its embeddings shared and not shared.

Needs CoLA's files under FEDVEIL_DATA and, in FEDVEIL_ENCODER, the folder of a saved BERT with its tokenizer; without
these this part is left out, and says so. The encoder of the published numbers below is all-MiniLM-L6-v2, which stands
in for BERT-base. Goes on from the rows of before. `benchmarks/lamp.py` has the attack that takes minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import fedveil as fv
from benchmarks.tables import STORE, Table, measured
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import Estimate
from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.vocabulary import text_library

WHO = {
    "ceiling": "no defense",
    "naive": "naive",
    "adaptive": "knows the defense",
}
TOKENS = range(5, 13)  # of a sentence, without special ones
DEFENSES = (
    "fedem:radius=2",
    "dp-sgd:clip=1,noise_multiplier=0.001",
    "gradient-masking:share=0.25",
    "gradient-dropout",
    "dp-sgd:clip=1,noise_multiplier=0.0003",
)
EMBEDDINGS = {"shared": "trained", "not shared": "frozen"}
ROWS, SPAN = "token-rows", "token-span"
ENCODER = "all-MiniLM-L6-v2 (6 layers, which stands in for BERT-base) with a fresh classifier, before any training"
HEAD = [
    "defense",
    "embedding gradients",
    "batch",
    "attack",
    "sentences",
    "attacker",
    "whole sentences",
    "ROUGE-2",
    "ROUGE-1",
    "s per sentence",
]


@dataclass(frozen=True)
class Case:
    """One attack on some updates."""

    attack: str
    embeddings: str
    batch: int
    updates: int
    defense: str = "none"

    @property
    def key(self) -> list[str]:
        """The cells that a row of it begins with."""
        sentences = self.updates * self.batch
        return [self.defense, self.embeddings, str(self.batch), self.attack, str(sentences)]


BARE = (
    Case(SPAN, "not shared", 1, 40),
    Case(SPAN, "not shared", 4, 12),
    Case(ROWS, "shared", 1, 20),
    Case(ROWS, "shared", 4, 8),
)
DEFENDED = tuple(
    Case(attack, embeddings, 1, 10, defense)
    for attack, embeddings in ((ROWS, "shared"), (SPAN, "not shared"))
    for defense in DEFENSES
)
TITLES = {
    "bare": "Sentences of CoLA from gradients of MiniLM, no defense",
    "defended": "Sentences of CoLA from gradients of MiniLM under defenses, batches of one",
    "quick": "A text audit of eight sentences with the suite quick",
}


def measure() -> Iterator[list[Table]]:
    torch.set_num_threads(1)
    encoder = os.environ.get("FEDVEIL_ENCODER", "")
    try:
        sentences = short_sentences(encoder, STORE)
    except FedveilError as error:
        print(f"text is left out: {error}")
        return
    kept = {table.title: table for table in measured("text")}
    tables = {name: kept.get(title, _empty(name)) for name, title in TITLES.items()}
    for name, cases in (("bare", BARE), ("defended", DEFENDED)):
        for case in cases:
            if case.key in [row[: len(case.key)] for row in tables[name].rows]:
                continue
            add(tables[name], case, audited(task_of(sentences, encoder, case.embeddings), case))
            yield _grown(tables)
    for embeddings in EMBEDDINGS:
        if embeddings not in [row[0] for row in tables["quick"].rows]:
            add_quick(tables["quick"], task_of(sentences, encoder, embeddings), embeddings)
            yield _grown(tables)


def _grown(tables: dict[str, Table]) -> list[Table]:
    return [table for table in tables.values() if table.rows]


def _empty(name: str) -> Table:
    about = f"Sentences of {TOKENS[0]} to {TOKENS[-1]} tokens that no attack was tuned on, {ENCODER}."
    if name == "quick":
        head = ["embedding gradients", "attacks that ran", "strongest", "whole sentences", "s in all"]
        return Table(TITLES[name], head, f"{about} Under Gradient Dropout, with all roles and floors, one thread.")
    told = (
        f"{about} Means in %, with 95 % intervals. Neither lengths nor labels are known. Seconds are those of an "
        "attack in all its roles, on a busy machine."
    )
    return Table(TITLES[name], HEAD, told)


def short_sentences(encoder: str, folder: Path) -> Path:
    """A file of CoLA's sentences that have a few tokens: every second one, none of which the attacks were tuned on."""
    if not encoder:
        raise FedveilError("FEDVEIL_ENCODER names no folder of a saved BERT")
    data = datasets.parse("cola").load()
    tokenizer = text_library("tokenizers").Tokenizer.from_file(str(Path(encoder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = [
        (text, label) for part in (data.train, data.test) for text, label in zip(part.texts, part.labels, strict=True)
    ]
    found = tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
    kept = [pair for pair, each in zip(texts, found, strict=True) if len(each.ids) in TOKENS]
    folder.mkdir(exist_ok=True)
    path = folder / "short.tsv"
    path.write_text("".join(f"{text}\t{label}\n" for text, label in kept[1::2]), encoding="utf-8")
    return path


def task_of(sentences: Path, encoder: str, embeddings: str) -> fv.Task:
    return fv.task(
        f"sentences:path={sentences},length={TOKENS[-1] + 2},tokenizer={encoder}",
        model=f"bert:weights={encoder},embeddings={EMBEDDINGS[embeddings]}",
    )


def audited(task: fv.Task, case: Case) -> AuditResult:
    begun = time.perf_counter()
    settings = fv.AuditSettings(
        victims=case.updates, batch_size=case.batch, link=False, reference="none", candidates=50
    )
    defense = None if case.defense == "none" else case.defense
    found = fv.audit(task, defense, case.attack, settings=settings, train=False, store=STORE)
    print(f"{case}: {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def add(table: Table, case: Case, found: AuditResult) -> None:
    """A row for every attacker who faces this defense."""
    run = found.result.attacks[0]
    for role in ("naive", "adaptive") if case.defense != "none" else ("ceiling",):
        row = found.result.row(role, run.attack)  # type: ignore[arg-type]
        if row is None:
            continue
        numbers = [shown(row.metrics[name]) for name in ("whole_sentences", "rouge2", "rouge1")]
        table.add(*case.key, WHO[role], *numbers, f"{run.seconds / (run.victims * run.batch_size):.1f}")
        print(table.rows[-1], flush=True)


def add_quick(table: Table, task: fv.Task, embeddings: str) -> None:
    """How long an audit takes from its start to its verdict, and what the strongest attacker got."""
    begun = time.perf_counter()
    found = fv.audit(task, "gradient-dropout", suite="quick", settings=fv.AuditSettings(victims=8), train=False)
    seconds = time.perf_counter() - begun
    rows = [row for row in found.result.rows if row.role == "adaptive" and "whole_sentences" in row.metrics]
    best = max(rows, key=lambda row: row.metrics["whole_sentences"].mean)
    ran = ", ".join(run.attack for run in found.result.attacks)
    table.add(embeddings, ran, best.attack, shown(best.metrics["whole_sentences"]), f"{seconds:.0f}")
    print(table.rows[-1], flush=True)


def shown(share: Estimate) -> str:
    return f"{100 * share.mean:.1f} [{100 * share.low:.0f}, {100 * share.high:.0f}]"
