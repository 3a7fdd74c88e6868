"""Registries of what can be chosen by name, readable without importing torch.

fedveil's own methods are found by reading the sources of their folder: every class under
`@defenses.register("name")` in `fedveil/defenses/` is a defense. Third parties add theirs through entry points
of the group `fedveil.defenses` (likewise attacks, datasets, models), and a script through the decorator alone.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from fedveil.errors import FedveilError, unknown_name
from fedveil.fields import field_names, field_values, parse_spec, parse_value

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry:
    """What is known about a registered class without importing it."""

    name: str
    target: str  # "package.module:Class"
    summary: str  # first line of the class's docstring
    constants: dict[str, Any] = field(default_factory=dict)  # plain class variables, own or inherited: place, paper


class Registry:
    """The names of one kind of class, such as defenses.

    Register with a fixed signature; a name can be taken only once::

        @defenses.register("gradient-dropout")
        @declared
        class GradientDropout(Defense): ...
    """

    def __init__(self, kind: str, group: str, package: str) -> None:
        self.kind = kind
        self.group = group  # entry-point group of third parties; its last part is the decorator's name
        self.package = package  # of fedveil's own classes
        self._loaded: dict[str, type] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator that gives a class its name."""

        def add(cls: C) -> C:
            taken = self._loaded.get(name)
            if taken is not None and (taken.__module__, taken.__qualname__) != (
                cls.__module__,
                cls.__qualname__,
            ):
                raise FedveilError(f"the {self.kind} name '{name}' is taken by {taken.__module__}.{taken.__qualname__}")
            own = None if cls.__module__.startswith(f"{self.package}.") else self._own().get(name)
            if own is not None:
                raise FedveilError(f"the {self.kind} name '{name}' is taken by {own.target.replace(':', '.')}")
            self._loaded[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def entries(self) -> dict[str, Entry]:
        """Every registered name with its entry, sorted, without importing modules."""
        found = dict(self._own())
        for point in entry_points(group=self.group):
            found.setdefault(point.name, Entry(point.name, point.value, f"from {_origin(point)}"))
        for name, cls in self._loaded.items():
            summary = (cls.__doc__ or "").strip().partition("\n")[0]
            found.setdefault(name, Entry(name, f"{cls.__module__}:{cls.__qualname__}", summary))
        return dict(sorted(found.items()))

    def class_names(self) -> list[str]:
        """The names of fedveil's own classes, sorted, without importing them."""
        return sorted(self._homes())

    def class_named(self, name: str) -> type:
        """One of fedveil's own classes, for the `__getattr__` of its package."""
        homes = {} if name.startswith("_") else self._homes()
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=1)
            hint = f": did you mean '{near[0]}'?" if near else ""
            raise AttributeError(f"module '{self.package}' has no attribute '{name}'{hint}")
        found: type = getattr(importlib.import_module(homes[name]), name)
        return found

    def stub(self) -> str:
        """What type checkers read instead of the package's `__getattr__`: an import of every class."""
        lines = [f"from {home} import {name} as {name}" for name, home in self._homes().items()]
        return "\n".join([f'"""The registered {self.kind}s, written by `make stubs`."""', "", *sorted(lines), ""])

    def _homes(self) -> dict[str, str]:
        """The modules of fedveil's own classes, by class name."""
        targets = (entry.target.partition(":") for entry in self._own().values())
        return {name: module for module, _, name in targets}

    def _own(self) -> dict[str, Entry]:
        return _scan(self.package, f"{self.group.rpartition('.')[2]}.register")

    def load(self, name: str) -> type:
        """The class behind a name; imports its module if necessary."""
        if name not in self._loaded:
            entries = self.entries()
            if name not in entries and self is datasets and name.lower().endswith((".csv", ".csv.gz", ".tsv")):
                raise FedveilError(f"unknown data set '{name}': a table of your own is csv:path={name},target=COLUMN")
            if name not in entries and self is datasets and "/" in name:
                raise FedveilError(f"unknown data set '{name}': pictures of your own are image-folder:path={name}")
            if name not in entries:
                raise unknown_name(self.kind, name, entries)
            target = entries[name].target
            for point in entry_points(group=self.group):
                # Do not guess which one is meant. A distribution that is found twice has equal targets.
                if point.name == name and point.value != target:
                    both = f"{target} and {point.value} (from {_origin(point)})"
                    raise FedveilError(f"the {self.kind} name '{name}' is taken twice, by {both}: uninstall one")
            module, _, attribute = target.partition(":")
            try:
                cls = operator.attrgetter(attribute)(importlib.import_module(module))
            except (ImportError, AttributeError) as error:
                raise FedveilError(f"cannot load the {self.kind} '{name}' from {target}: {error}") from error
            self.register(name)(cls)
        return self._loaded[name]

    def build(self, name: str, **fields: Any) -> Any:
        """An instance by name and fields; unknown or bad fields raise a `FedveilError`."""
        return self.load(name)(**fields)

    def parse(self, spec: str) -> Any:
        """An instance from the command line's `name:field=value,...`."""
        name, fields = parse_spec(spec)
        return self.build(name, **fields)

    def describe(self, thing: Any) -> dict[str, Any]:
        """The name and fields of an instance as plain data: the inverse of `build(**...)`."""
        return {"name": thing.name, **field_values(thing)}

    def spell(self, thing: Any) -> str:
        """The instance as the command line writes it, naming only fields that differ from their default."""
        cls = type(thing)
        if not is_dataclass(cls):
            raise FedveilError(f"the class {cls.__name__} is not declared: put @declared (of fedveil.fields) above it")
        try:
            plain = cls()
        except FedveilError:  # some field has no default
            plain = None
        parts = []
        for key in field_names(cls):
            value = getattr(thing, key)
            if plain is None or value != getattr(plain, key):
                parts.append(f"{key}={spelled(value)}")
        return f"{thing.name}:{','.join(parts)}" if parts else str(thing.name)


def spelled(value: Any) -> str:
    """A value as the command line writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(spelled(item) for item in value)}]"
    if isinstance(value, str):
        # A bare word if it reads back as itself, otherwise in quotes. JSON's escapes are valid TOML except for one.
        bare = re.fullmatch(r"[\w./ +-]+", value) and value == value.strip() == parse_value(value)
        return value if bare else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


@functools.cache
def _scan(package: str, decorator: str) -> dict[str, Entry]:
    """Find the registered classes of a package by reading its sources."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return {}
    modules = {
        path.stem: ast.parse(path.read_text(encoding="utf-8"))
        for folder in spec.submodule_search_locations
        for path in sorted(Path(folder).glob("*.py"))
    }
    nodes = [(stem, node) for stem, tree in modules.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for _, node in nodes}
    found: dict[str, Entry] = {}
    for stem, node in nodes:
        for name in _names_given(node, decorator):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            found[name] = Entry(name, f"{package}.{stem}:{node.name}", summary, _constants(node, classes))
    return found


def _names_given(node: ast.ClassDef, decorator: str) -> list[str]:
    return [
        call.args[0].value
        for call in node.decorator_list
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith(decorator)
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    ]


def _constants(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> dict[str, Any]:
    """The class variables with a literal value, including those of bases in the same package."""
    others = {name: other for name, other in classes.items() if name != node.name}
    found: dict[str, Any] = {}
    for base in reversed(node.bases):
        above = others.get(ast.unparse(base).rpartition(".")[2])
        found |= _constants(above, others) if above is not None else {}
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value, annotation=annotation):
                if not ast.unparse(annotation).startswith("ClassVar"):
                    continue  # a field, whose value belongs to the instance
            case _:
                continue
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:
            found.pop(name, None)  # known only at run time; overrides that of a base
    return found


defenses = Registry("defense", "fedveil.defenses", "fedveil.defenses")
attacks = Registry("attack", "fedveil.attacks", "fedveil.attacks")
datasets = Registry("data set", "fedveil.datasets", "fedveil.tasks.datasets")
models = Registry("model", "fedveil.models", "fedveil.tasks.models")
REGISTRIES = {"defenses": defenses, "attacks": attacks, "datasets": datasets, "models": models}


def write_stubs() -> None:
    """Write the stubs beside the packages whose classes are also attributes."""
    for registry in (defenses, attacks):
        path = Path(__file__).parent / registry.package.rpartition(".")[2] / "__init__.pyi"
        path.write_text(registry.stub(), encoding="utf-8")
