"""What leaks of sentences: CoLA under a real encoder, with the gradients of its embeddings shared and not shared.

Needs CoLA's files under FEDVEIL_DATA and, in FEDVEIL_ENCODER, the folder of a saved BERT with its tokenizer; without
these this part is left out, and says so. The encoder of the published numbers below is all-MiniLM-L6-v2, which stands
in for BERT-base.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import fedveil as fv
from benchmarks.tables import Table
from fedveil.auditing.audit_result import AuditResult
from fedveil.errors import FedveilError
from fedveil.registry import datasets
from fedveil.tasks.vocabulary import text_library

ROLES = {"ceiling": "no defense", "naive": "naive", "adaptive": "knows the defense"}
TOKENS = range(5, 13)  # of a sentence, without special ones
DEFENSES = (
    "none",
    "fedem:radius=2",
    "dp-sgd:clip=1,noise_multiplier=0.001",
    "gradient-masking:share=0.25",
    "gradient-dropout",
)
SHARED = {"trained": ("yes", "token-rows"), "frozen": ("no", "token-span")}
VICTIMS = 8  # updates
UNDEFENDED = 20


def measure() -> Iterator[list[Table]]:
    torch.set_num_threads(1)
    encoder = os.environ.get("FEDVEIL_ENCODER", "")
    table = Table(
        "Sentences of CoLA from gradients of MiniLM, batches of one and of four",
        [
            "defense",
            "embedding gradients shared",
            "batch",
            "attack",
            "attacker",
            "whole sentences",
            "ROUGE-2",
            "ROUGE-1",
            "s per sentence",
        ],
        f"{UNDEFENDED} updates without a defense, {VICTIMS} under each; sentences of {TOKENS[0]} to {TOKENS[-1]} tokens"
        " that no attack was tuned on, all-MiniLM-L6-v2 (6 layers, which stands "
        "in for BERT-base) with a fresh classifier, before any training. Means in %, with 95 % intervals of whole "
        "sentences. Seconds are those of an attack in all its roles.",
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            if not encoder:
                raise FedveilError("FEDVEIL_ENCODER names no folder of a saved BERT")
            path = short_sentences(Path(encoder), Path(folder))
        except FedveilError as error:
            print(f"text is left out: {error}")
            return
        for defense, embeddings, batch in cases():
            task = fv.task(
                f"sentences:path={path},length={TOKENS[-1] + 2},tokenizer={encoder}",
                model=f"bert:weights={encoder},embeddings={embeddings}",
            )
            add(table, defense, embeddings, audited(task, defense, SHARED[embeddings][1], batch))
            yield [table]


def cases() -> Iterator[tuple[str, str, int]]:
    for batch in (1, 4):
        for embeddings in SHARED:
            yield "none", embeddings, batch
    for defense in DEFENSES[1:]:
        for embeddings in SHARED:
            yield defense, embeddings, 1


def short_sentences(encoder: Path, folder: Path) -> Path:
    """A file of CoLA's sentences that have a few tokens: every second one, none of which the attacks were tuned on."""
    data = datasets.parse("cola").load()
    tokenizer = text_library("tokenizers").Tokenizer.from_file(str(encoder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = [
        (text, label) for part in (data.train, data.test) for text, label in zip(part.texts, part.labels, strict=True)
    ]
    found = tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
    kept = [pair for pair, each in zip(texts, found, strict=True) if len(each.ids) in TOKENS]
    path = folder / "short.tsv"
    path.write_text("".join(f"{text}\t{label}\n" for text, label in kept[1::2]), encoding="utf-8")
    return path


def audited(task: fv.Task, defense: str, attack: str, batch: int) -> AuditResult:
    begun = time.perf_counter()
    settings = fv.AuditSettings(
        victims=victims_of(defense), batch_size=batch, link=False, reference="none", candidates=50
    )
    found = fv.audit(task, None if defense == "none" else defense, attack, settings=settings, train=False)
    print(f"{defense}, {attack}, batch {batch}: {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def victims_of(defense: str) -> int:
    return UNDEFENDED if defense == "none" else VICTIMS


def add(table: Table, defense: str, embeddings: str, found: AuditResult) -> None:
    """A row for every attacker who faces this defense."""
    run = found.result.attacks[0]
    for row in found.result.rows:
        wanted = row.role in (("ceiling",) if defense == "none" else ("naive", "adaptive"))
        if row.attack != run.attack or row.round is not None or not wanted:
            continue
        whole, one, two = (row.metrics[name] for name in ("whole_sentences", "rouge1", "rouge2"))
        table.add(
            defense,
            SHARED[embeddings][0],
            run.batch_size,
            row.attack,
            ROLES[row.role],
            f"{100 * whole.mean:.0f} [{100 * whole.low:.0f}, {100 * whole.high:.0f}]",
            f"{100 * two.mean:.1f}",
            f"{100 * one.mean:.1f}",
            f"{run.seconds / (run.victims * run.batch_size):.1f}",
        )
        print(table.rows[-1], flush=True)
