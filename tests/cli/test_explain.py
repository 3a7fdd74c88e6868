"""Every field of everything that can be chosen by name is explained."""

from __future__ import annotations

import json

import pytest

from fedveil.attacks import GradInversion
from fedveil.cli.explain import explained, presets
from fedveil.fields import Count, Positive, declared, field_names
from fedveil.registry import REGISTRIES, attacks
from journeys.console import refused


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_field_has_an_explanation_and_a_range(kind: str) -> None:
    found = {name: REGISTRIES[kind].load(name) for name in REGISTRIES[kind].entries()}
    fields = [(name, field) for name, cls in found.items() for field in explained(cls)]
    assert [field.name for _, field in fields] == [name for cls in found.values() for name in field_names(cls)]
    for name, field in fields:
        assert len(field.explanation) > 5, f"{name}.{field.name}: say in a comment beside the field what it is"
        assert field.allowed not in ("", "any value"), f"{name}.{field.name}"


@declared
class Odd:
    """A class with fields of all sorts."""

    plain: Positive = 0.5  # k in the paper: how much
    # first line
    # and second
    wide: tuple[Count, ...] = (1, 2)
    bare: str | None = None
    other: bool = False  # in short: nothing


def test_comments_beside_and_above_a_field_are_read() -> None:
    found = {field.name: field for field in explained(Odd)}
    assert found["plain"].plain() == {
        "name": "plain",
        "allowed": "number > 0",
        "default": 0.5,
        "explanation": "how much",
        "symbol": "k in the paper",
    }
    assert found["wide"].explanation == "first line and second"
    assert found["wide"].allowed == "list of integers ≥ 1"
    assert (found["bare"].explanation, found["bare"].allowed) == ("", "text, or none")
    assert found["other"].plain()["explanation"] == "in short: nothing"
    assert explained(int) == []


def test_one_defense_is_listed_with_its_fields(fedveil, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = fedveil("list", "defenses", "gradient-dropout")
    assert said.code == 0
    assert "keep: number > 0 and ≤ 1; default 0.8\n      p in the paper: probability that an entry is kept" in said.out
    assert "at: gradient or upload; default gradient" in said.out
    assert max(map(len, said.out.splitlines())) < 80
    plain = json.loads(fedveil("list", "defenses", "gradient-dropout", "--json").out)
    assert plain["name"] == "gradient-dropout"
    assert plain["fields"][0] == {
        "name": "keep",
        "allowed": "number > 0 and ≤ 1",
        "default": 0.8,
        "explanation": "probability that an entry is kept",
        "symbol": "p in the paper",
    }


def test_published_settings_are_shown_as_the_command_line_takes_them(fedveil) -> None:
    shown = fedveil("list", "attacks", "ci-net").out
    assert "preset figure2: ci-net:steps=4000,polish=0" in shown
    assert "30,000 steps" in shown
    plain = json.loads(fedveil("list", "attacks", "grad-inversion", "--json").out)
    (published,) = plain["presets"]
    assert attacks.parse(published["spec"]) == GradInversion.published()
    assert "preset" not in fedveil("list", "attacks", "link").out


@declared
class Made:
    """A class with class methods of all sorts."""

    size: Count = 1

    @classmethod
    def large(cls, factor: int = 2) -> Made:
        """Twice
        as large."""
        return cls(size=factor)

    @classmethod
    def of(cls, size: int) -> Made:
        """Needs something."""
        return cls(size=size)

    @classmethod
    def count(cls) -> int:
        """Makes something else."""
        return 1


def test_presets_are_class_methods_that_make_one_of_nothing() -> None:
    assert presets(Made) == {"large": (Made(size=2), "Twice as large.")}


def test_other_kinds_too(fedveil) -> None:
    assert "path: text; required" in fedveil("list", "datasets", "image-folder").out
    assert "hidden: list of integers ≥ 1; default [256]" in fedveil("list", "models", "mlp").out
    assert "steps: integer ≥ 1; default 300" in fedveil("list", "attacks", "dlg").out
    assert "It has no fields" in fedveil("list", "models", "lenet").out
    assert fedveil("list", "metrics", "psnr").out.startswith("  psnr  ")
    refused(fedveil("list", "defenses", "gradient-dropuot"), "did you mean 'gradient-dropout'?")
    refused(fedveil("list", "defenses", "clip:norm=1"), "give the name alone: fedveil list defenses clip")
