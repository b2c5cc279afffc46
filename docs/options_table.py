"""The table of docs/choosing.md that says which option goes with what, made of `pmoe.runners.features`."""

from __future__ import annotations

import re

from pmoe.runners.features import TAKES, Feature


def told(feature: Feature) -> str:
    """The words of a refusal without the layer's values.

    Example: "memory_reuse ({memory_reuse}) may offload" -> "memory_reuse may offload".
    """
    return re.sub(r"\{\w+\}", "...", re.sub(r" \(\{\w+\}\)", "", feature.value))


def rows() -> list[list[str]]:
    """The heading, then a row for each feature: its words, and whether each column takes it."""
    heading = ["the layer's options say", *TAKES]
    return [
        heading,
        *([told(each), *("yes" if each in takes else "no" for takes in TAKES.values())] for each in Feature),
    ]


def markdown() -> str:
    heading, *body = (" | ".join(cells) for cells in rows())
    rule = "|".join(["---"] * (1 + len(TAKES)))
    return "\n".join([f"| {heading} |", f"|{rule}|", *(f"| {row} |" for row in body)])
