"""The fields of a declared class in words: allowed values come from their types, explanations from their comments.

The comment beside a field (or right above it) explains it: `keep: KeepProbability = 0.8  # p in the paper: probability
that an entry is kept`. The paper's own symbol, if there is one, comes before the colon.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from dataclasses import dataclass
from typing import Any

import pydantic

from fedveil.fields import LARGEST
from fedveil.registry import spelled

_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
_CALLED = re.compile(r"(\S+ in (?:the papers?|[A-Z]\w+)): (.+)")


@dataclass(frozen=True)
class Explained:
    """One field."""

    name: str
    allowed: str  # "number > 0 and ≤ 1"
    required: bool
    default: Any
    explanation: str  # "p in the paper: probability that an entry is kept"; may be empty

    def plain(self) -> dict[str, Any]:
        """As plain data for JSON, with the paper's symbol apart."""
        called = _CALLED.fullmatch(self.explanation)
        return {
            "name": self.name,
            "allowed": self.allowed,
            **({} if self.required else {"default": self.default}),
            "explanation": called[2] if called else self.explanation,
            "symbol": called[1] if called else None,
        }


def explained(cls: type) -> list[Explained]:
    """The fields of a class in order; none if the class is not declared."""
    if not dataclasses.is_dataclass(cls):
        return []
    described = pydantic.TypeAdapter(cls).json_schema()
    schemas, shared = described.get("properties", {}), described.get("$defs", {})
    comments = _comments(cls)
    found = []
    for field in dataclasses.fields(cls):
        schema = schemas.get(field.name, {})
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        required = made is dataclasses.MISSING
        words = schema.get("description") or comments.get(field.name, "")
        found.append(Explained(field.name, _allowed(schema, shared), required, None if required else made, words))
    return found


def presets(cls: type) -> dict[str, tuple[Any, str]]:
    """Published settings: what each public class method of a class that returns one and needs nothing makes, and why.

    The method says both: by its annotation, and by its docstring.
    """
    found = {}
    for name, method in vars(cls).items():
        if not isinstance(method, classmethod) or name.startswith("_"):
            continue
        form = inspect.signature(getattr(cls, name))
        needs = [given for given in form.parameters.values() if given.default is given.empty]
        if form.return_annotation in (cls, cls.__name__, "Self") and not needs:
            found[name] = getattr(cls, name)(), " ".join((inspect.getdoc(method) or "").split())
    return found


def _allowed(schema: dict[str, Any], shared: dict[str, Any]) -> str:
    """A field's JSON schema in words.

    >>> _allowed({"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 1}}, {"type": "null"}]}, {})
    'list of integers ≥ 1, or none'
    >>> _allowed({"enum": ["l1", "l2"], "type": "string"}, {})
    'l1 or l2'
    """
    if "$ref" in schema:
        return _allowed(shared.get(schema["$ref"].rpartition("/")[2], {}), shared)
    if "anyOf" in schema:
        parts = [_allowed(each, shared) for each in schema["anyOf"] if each.get("type") != "null"]
        none = ", or none" if len(parts) < len(schema["anyOf"]) else ""
        return " or ".join(parts) + none
    if "enum" in schema or "const" in schema:
        choices = [str(each) for each in schema.get("enum", [schema.get("const")])]
        return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    kind = schema.get("type")
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        inside = _allowed(schema.get("items", {}), shared)
        return "list of " + re.sub("^(number|integer)", "\\g<1>s", inside)
    # Not worth mentioning: every number must fit into float32.
    known = {sign: schema[key] for key, sign in _BOUNDS.items() if schema.get(key, LARGEST) != LARGEST}
    bounds = " and ".join(f"{sign} {spelled(bound)}" for sign, bound in known.items())
    return " ".join(filter(None, ({"string": "text"}.get(str(kind), str(kind or "any value")), bounds)))


def _comments(cls: type) -> dict[str, str]:
    """The comments of the fields of a class and its bases, as far as their sources are available."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):
            continue
        node = ast.parse(source).body[0]
        if isinstance(node, ast.ClassDef):
            found |= _comments_in(node, source)
    return found


def _comments_in(node: ast.ClassDef, source: str) -> dict[str, str]:
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = alone if not token.line[: token.start[1]].strip() else beside
            where[token.start[0]] = token.string.lstrip("# ")
    found = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        above: list[str] = []
        line = item.lineno - 1
        while line in alone:
            above.insert(0, alone[line])
            line -= 1
        words = beside.get(item.end_lineno or item.lineno) or " ".join(above)
        if words:
            found[item.target.id] = words
    return found
