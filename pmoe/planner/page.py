"""A page of one HTML file, made by jinja2 from `page.html`; nothing is loaded from outside."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

THEME: Mapping[str, tuple[str, str]] = {
    "ink": ("#1d2125", "#e4e7ea"),
    "soft": ("#5c646c", "#a0a8b0"),
    "rule": ("#dfe3e6", "#343a40"),
    "paper": ("#ffffff", "#14171a"),
    "panel": ("#f6f7f8", "#1c2024"),
    "mark": ("#fff3c4", "#4b4212"),
    "bad": ("#d03030", "#e04848"),
    "c0": ("#2f6db5", "#6aa5e8"),
    "c1": ("#d1512d", "#f08560"),
    "c2": ("#23823a", "#62bf7a"),
    "c3": ("#a8821a", "#d8b84a"),
    "c4": ("#8a3f8f", "#c88ad0"),
    "c5": ("#178a92", "#58c3ca"),
    "c6": ("#6b7280", "#a3acb5"),
    "c7": ("#b03060", "#ee86a8"),
}
"""CSS variables of a page: on light screens, on dark ones. c0 to c7 are those of series."""

SERIES = [name for name in THEME if name.startswith("c")]


def page(title: str, parts: Sequence[str], lead: str = "") -> str:
    """The page as HTML.

    parts: each a paragraph's text, or made by `part`. lead: a line below the title.
    """
    return _template().render(title=title, lead=lead, parts=parts).strip() + "\n"


def part(kind: str, *args: Any, **options: Any) -> str:
    """A part of a page, as markup. kind: a macro of `page.html`, which documents its arguments.

    Example: part("table", header=["n", "ms"], rows=[["1", "2.5"]]).
    """
    made: str = getattr(_template().module, kind)(*args, **options)
    return made


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pmoe", "planner"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(theme=THEME, title="", lead="", parts=[])
    return environment.get_template("page.html")
