"""A table of results, as Markdown and as plain data; what was measured before; and the store of long benchmarks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Audits of long benchmarks are kept here: one that was stopped goes on where it was.
STORE = Path(__file__).parent / ".store"
RESULTS = Path(__file__).parent / "results.json"


@dataclass
class Table:
    title: str
    head: list[str]
    note: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        self.rows.append([f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells])

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Table:
        return cls(**plain)

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        lines += ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in self.rows])


def measured(part: str) -> list[Table]:
    """The tables of a part as they were kept, for a long one to go on from. BENCH_AGAIN=1: none, to measure anew."""
    if os.environ.get("BENCH_AGAIN") == "1" or not RESULTS.exists():
        return []
    return [Table.of(plain) for plain in json.loads(RESULTS.read_text()).get(part, {}).get("tables", [])]
