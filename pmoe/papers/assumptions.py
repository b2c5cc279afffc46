"""What the reproductions assume: prose, which lies beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files


def assumptions(experiment: str) -> Mapping[str, str]:
    """What an experiment of `pmoe simulate` assumes, by name: a section of the page beside this file."""
    text = files(__package__).joinpath("assumptions.md").read_text(encoding="utf-8")
    section = text.partition(f"\n# {experiment}\n")[2].partition("\n# ")[0]
    blocks = (block.partition("\n") for block in section.strip().split("\n\n"))
    return {name.removeprefix("## "): " ".join(told.split()) for name, _, told in blocks}
