"""What the reproductions assume, and what the papers print: prose and numbers, which lie beside this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def assumptions(experiment: str) -> Mapping[str, str]:
    """What an experiment of `pmoe simulate` assumes, by name: a section of the page beside this file."""
    text = files(__package__).joinpath("assumptions.md").read_text(encoding="utf-8")
    section = text.partition(f"\n# {experiment}\n")[2].partition("\n# ")[0]
    blocks = (block.partition("\n") for block in section.strip().split("\n\n"))
    return {name.removeprefix("## "): " ".join(told.split()) for name, _, told in blocks}


def printed(name: str) -> Any:
    """Numbers of a paper's table or figure, as it prints them."""
    return json.loads(files(__package__).joinpath("printed.json").read_text(encoding="utf-8"))[name]
