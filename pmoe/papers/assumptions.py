"""What the reproductions assume, and what the papers print: prose and numbers, which lie beside this file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any


def assumptions(experiment: str) -> Mapping[str, str]:
    """What an experiment of `pmoe simulate` assumes, by name: a section of the page beside this file."""
    return section(files(__package__).joinpath("assumptions.md").read_text(encoding="utf-8"), experiment)


def section(page: str, title: str) -> Mapping[str, str]:
    """Texts by name, of a section of a page in Markdown whose headings are "# title" and "## name"."""
    found = page.partition(f"\n# {title}\n")[2].partition("\n# ")[0]
    blocks = (block.partition("\n") for block in found.strip().split("\n\n"))
    return {name.removeprefix("## "): " ".join(told.split()) for name, _, told in blocks}


def wrapped(texts: Mapping[str, str]) -> Iterator[str]:
    """Each name with its text beside it, which continues below itself."""
    width = max(map(len, texts)) + 2
    for name, text in texts.items():
        yield textwrap.fill(text, 110, initial_indent=name.ljust(width), subsequent_indent=" " * width)


def printed(name: str) -> Any:
    """Numbers of a paper's table or figure, as it prints them."""
    return json.loads(files(__package__).joinpath("printed.json").read_text(encoding="utf-8"))[name]
