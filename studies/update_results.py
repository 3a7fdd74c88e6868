"""Write the tables of RESULTS.md anew from a store; the words around them stay.

    python studies/update_results.py --store FOLDER [STUDY ...]

Between `<!-- fedcrap/table2 -->` and `<!-- end -->` stands what `fedveil study export` says of it at desk scale. A
study of which the store has nothing keeps its table. Without names, all studies are looked up.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from fedveil.cli.study import exported
from fedveil.files import write_atomically
from fedveil.study.rooms import IndexedStore
from fedveil.study.studying import find_study, illustrated, plan_study
from fedveil.tasks.sources import data_root

RESULTS = Path(__file__).parent / "RESULTS.md"
BLOCK = re.compile(r"(?<=<!-- )(?P<name>[\w-]+/[\w-]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def table(name: str, store: IndexedStore) -> str | None:
    """A study's table and what follows from its numbers, in Markdown; None if nothing of it was run."""
    outcome, drawings = illustrated(plan_study(find_study(name), "desk", store), store)
    if all(value.ours is None for value in outcome.values):
        return None
    made = exported(outcome, drawings, "md").replace(str(data_root(None)), "FEDVEIL_DATA")
    return re.sub(r"\A### .*\n\n", "", made)  # the section has a title of its own


def renewed(text: str, store: IndexedStore, names: Sequence[str] = ()) -> str:
    """The text of RESULTS.md with its tables, or those of some studies, as the store has them."""

    def block(found: re.Match[str]) -> str:
        made = table(found["name"], store) if not names or found["name"] in names else None
        return found[0] if made is None else f"{found['name']} -->\n\n{made}\n"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("studies", nargs="*", metavar="STUDY")
    asked = parser.parse_args()
    text = renewed(RESULTS.read_text(encoding="utf-8"), IndexedStore(asked.store), asked.studies)
    write_atomically(RESULTS, text.encode())
