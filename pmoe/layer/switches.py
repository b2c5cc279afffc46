"""Switches of a layer that exist to measure and to test it, and are no options of a model."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Switches:
    """How a layer runs where a benchmark or a test takes something away from it.

        layer.switches = Switches(sequential=True)

    bypass_local: rows whose expert is on this rank are computed in place. False sends them through the
    collective as well.
    sequential: every step waits for the one before: the baseline of overlap measurements.
    one_lane: collectives inside a node wait for those between nodes: the baseline of FSMoE's schedule.

    All ranks must set the same. Raises TypeError where a value is not True or False.
    """

    bypass_local: bool = True
    sequential: bool = False
    one_lane: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"{field.name} ({value!r}) must be True or False")
