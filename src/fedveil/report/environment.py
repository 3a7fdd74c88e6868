"""The templates of the pages."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedveil.report import formatting


@cache
def environment() -> Environment:
    """Where the pages are made from their templates."""
    made = Environment(
        loader=PackageLoader("fedveil.report", "templates"),
        autoescape=True,  # for every file, whatever its name: the result holds text of strangers
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["formatting"] = formatting
    return made
