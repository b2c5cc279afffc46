"""Options of ``torch.compile(model, backend="pmoe", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pmoe.arguments import check_count, check_flag, check_kind
from pmoe.text import parse_bytes

SLACK = 1.05
"""The default memory limit of another order, as a multiple of the graph's peak memory as traced."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the backend.

    parts: the largest number of parts that a range is cut into; 1 cuts nothing.
    weight_gradients: whether weight gradients are moved beside all-to-alls.
    memory_limit: bytes, or a string such as "2GiB", that inputs and results of a pass may take at one time.
        None allows `SLACK` times what they take in the order in which they were traced.
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
        """Returns the options of a dict, with defaults for the others.

        Raises TypeError or ValueError, naming option, value and rule.
        """
        known = [each.name for each in fields(Options)]
        check_kind((Mapping, type(None)), f"a dict of {', '.join(known)}", options=options)
        for name in options or {}:
            if name not in known:
                raise ValueError(f"options ({name!r}) must be one of {', '.join(known)}")
        return Options(**(options or {}))

    def limit(self, traced: int) -> float:
        """Returns the memory limit in bytes. traced: bytes that the graph takes as traced, always allowed."""
        memory_limit = self.memory_limit
        return (
            SLACK * traced if memory_limit is None else max(parse_bytes("memory_limit", memory_limit), traced)
        )
