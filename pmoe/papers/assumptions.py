"""Assumptions of the reproductions (assumptions.md), and numbers that the papers print (printed.json)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any


def assumptions(experiment: str) -> Mapping[str, str]:
    """Returns the assumptions of an experiment: a dict {name of the assumption: text}.

    experiment: name of the experiment in `pmoe simulate`, such as "comet".
    """
    return section(files(__package__).joinpath("assumptions.md").read_text(encoding="utf-8"), experiment)


def section(page: str, title: str) -> Mapping[str, str]:
    """Returns the texts below one heading of a Markdown page: a dict {name: text}.

    page: the whole text of the page.
    title: the heading, without "# ". Each text below the heading has a heading "## name" of its own.
    """
    body = page.partition(f"\n# {title}\n")[2].partition("\n# ")[0]
    blocks = (block.partition("\n") for block in body.strip().split("\n\n"))
    return {name.removeprefix("## "): " ".join(text.split()) for name, _, text in blocks}


def wrapped(texts: Mapping[str, str]) -> Iterator[str]:
    """Yields a string for each name and its text, in two columns, wrapped to 110 characters.

    texts: the texts by name.
    """
    width = max(map(len, texts)) + 2
    for name, text in texts.items():
        yield textwrap.fill(text, 110, initial_indent=name.ljust(width), subsequent_indent=" " * width)


def printed(name: str) -> Any:
    """Returns the numbers of a paper's table or figure, as the paper prints them.

    name: name of the table or figure in printed.json, such as "comet table 3".
    """
    return json.loads(files(__package__).joinpath("printed.json").read_text(encoding="utf-8"))[name]
