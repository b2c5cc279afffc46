"""Options of ``torch.compile(model, backend="pmoe", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pmoe.arguments import check_count, check_flag, check_kind
from pmoe.text import parse_bytes

SLACK = 1.05
"""The default memory limit, divided by the peak memory of the graph in the order of its trace."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the backend "pmoe" of torch.compile.

    parts: the largest number of parts into which the batch is cut. All-to-alls of one part run while another
        part is computed. With 1 nothing is cut.
    weight_gradients: whether gradients of weights are computed while all-to-alls run.
    memory_limit: the most memory that the inputs and results of a pass may take at one time, in bytes or as a
        string such as "2GiB". None allows `SLACK` times the peak memory of the order in which the pass was
        traced.

    Raises ValueError or TypeError for a bad value.
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
        """Returns the options in a dict, with defaults for the options that are not in it.

        options: the values by the names of this class's fields, or None for all defaults.

        Raises TypeError or ValueError for a bad option. The message names the option, its value and the rule.
        """
        known = [option.name for option in fields(Options)]
        check_kind((Mapping, type(None)), f"a dict of {', '.join(known)}", options=options)
        for name in options or {}:
            if name not in known:
                raise ValueError(f"options ({name!r}) must be one of {', '.join(known)}")
        return Options(**(options or {}))

    def limit(self, traced: int) -> float:
        """Returns the memory limit of a pass in bytes.

        traced: peak bytes of the pass if its operators run in the order in which they were traced. The limit
            is at least this number, so that there is always an order within the limit.
        """
        memory_limit = self.memory_limit
        return (
            SLACK * traced if memory_limit is None else max(parse_bytes("memory_limit", memory_limit), traced)
        )
