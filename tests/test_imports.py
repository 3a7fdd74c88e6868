"""The rooms know only the rooms below them, and nothing depends on one machine's folders."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedveil"

# Each room may import from itself and from those to its left.
ORDER = (
    *("version", "errors", "fields", "files", "toml", "ownership", "signals", "tensors", "progress", "registry"),
    *(
        "memory",
        "tree",
        "intake",
        "streams",
        "fork_server",
        "workers",
        "tasks",
        "tensorfile",
        "clients",
        "defenses",
        "ledger",
    ),
    *("federation", "guard", "attacks", "leakage", "auditing", "study", "report", "vetting", "loops", "nvflare"),
    *("flower", "cli", "__main__"),
)
# Metrics must not favor a method: they know neither side.
FORBIDDEN = {"leakage": {"defenses", "attacks", "federation", "guard"}, "attacks": {"federation", "guard"}}
# A result writes its own report. It looks up only inside that method.
EXCEPTIONS = {("auditing/audit_result.py", "report"), ("study/compare.py", "report")}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            if node.module == "fedveil":
                found |= {alias.name for alias in node.names}
            elif node.module and node.module.startswith("fedveil."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedveil.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    own = room(path)
    assert own in ORDER, f"the room '{own}' is new: give it a place in the order"
    allowed = set(ORDER[: ORDER.index(own) + 1]) - FORBIDDEN.get(own, set())
    name = str(path.relative_to(PACKAGE))
    wrong = {other for other in imported_rooms(path) - allowed if (name, other) not in EXCEPTIONS}
    assert not wrong, f"{name} must not import from {', '.join(sorted(wrong))}"


def test_the_exceptions_are_needed_and_lazy() -> None:
    for name, other in EXCEPTIONS:
        tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
        at_top = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        assert not any((node.module or "").startswith(f"fedveil.{other}") for node in at_top)
        assert other in imported_rooms(PACKAGE / name)


def test_the_front_door_imports_its_names_when_they_are_used() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    loaded = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert loaded <= {"__future__", "pathlib", "typing"}


def test_no_test_leans_on_a_folder_of_one_machine() -> None:
    own = re.compile(r"(?<![\w.])/(work|home|root|Users|mnt)/\w")
    for path in (ROOT / "tests").rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not own.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
