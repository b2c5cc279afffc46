"""Tables of the pages that are made of the code when the site is built: nothing is written twice."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pmoe.papers.fsmoe_table5 import ASSUMPTIONS
from pmoe.runners.features import SUPPORTED, Feature

REFUSERS = [component for component, takes in SUPPORTED.items() if takes != frozenset(Feature)]
"""The columns: all but the pipeline, which takes everything."""


def options() -> str:
    """Which option goes with what: a row for each feature of a layer."""
    rows = [
        [words_of(each), *("yes" if each in SUPPORTED[component] else "no" for component in REFUSERS)]
        for each in Feature
    ]
    return markdown(["the layer's options say", *REFUSERS], rows)


def words_of(feature: Feature) -> str:
    """The words of a refusal without the layer's values.

    Example: "memory_reuse ({memory_reuse}) may offload" -> "memory_reuse may offload".
    """
    return re.sub(r"\{\w+\}", "...", re.sub(r" \(\{\w+\}\)", "", feature.value))


def assumptions() -> str:
    """What is assumed for FSMoE's Table 5."""
    return markdown(["what", "assumed"], [[name, told] for name, told in ASSUMPTIONS.items()])


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


TABLES = {"options": options, "assumptions": assumptions}
