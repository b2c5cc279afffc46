"""What `torch.compile(model, backend="pmoe", options={...})` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pmoe.arguments import check_count, check_flag, check_kind
from pmoe.text import parse_bytes

SLACK = 1.05
"""Of a graph's peak memory as it was traced, what another order may take where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """parts: the most that a range is cut in; 1 cuts none. weight_gradients: whether they are placed beside
    all-to-alls. memory_limit: bytes, or a string such as "2GiB", that results and inputs of one pass may
    take at one time; None is a twentieth more than they take in the order in which they were traced.
    """

    parts: int = 8
    weight_gradients: bool = True
    memory_limit: int | str | None = None

    def __post_init__(self) -> None:
        check_count(parts=self.parts)
        check_flag("weight_gradients", self.weight_gradients)
        if self.memory_limit is not None:
            parse_bytes("memory_limit", self.memory_limit)

    @staticmethod
    def of(options: Mapping[str, Any] | None) -> Options:
        """Raises TypeError or ValueError, naming option, value and rule."""
        known = [each.name for each in fields(Options)]
        check_kind((Mapping, type(None)), f"a dict of {', '.join(known)}", options=options)
        for name in options or {}:
            if name not in known:
                raise ValueError(f"options ({name!r}) must be of {', '.join(known)}")
        return Options(**(options or {}))

    def limit(self, traced: int) -> float:
        """Bytes; never less than the graph takes as it was traced."""
        asked = self.memory_limit
        return SLACK * traced if asked is None else max(parse_bytes("memory_limit", asked), traced)
