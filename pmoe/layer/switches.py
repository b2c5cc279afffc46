"""Switches of a layer that exist to measure and to test it, and are no options of a model."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Which parts of a layer a benchmark or a test turns off.

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


NAMES = frozenset(field.name for field in fields(Switches))


def check_no_switch(name: str, value: object) -> None:
    """Raises AttributeError where ``name``, which is set on a layer, is a switch: it would have no effect."""
    if name in NAMES:
        raise AttributeError(
            f"{name} ({value!r}) must be set in layer.switches: layer.switches = Switches({name}={value!r})"
        )
