"""A gate by its name, as MoELayer's argument ``gate`` gives it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pmoe.gates.base import Gate


def make_gate(
    gates: Mapping[str, type[Gate]],
    name: str,
    sizes: tuple[int, int, int],
    capacity_factor: float | None,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Gate:
    """gates[name](*sizes) with the options of all gates and those that were ``given``, None left out.

    Raises ValueError for an unknown name, and for an option that this gate does not have.
    """
    if name not in gates:
        raise ValueError(f"gate ({name!r}) must be a module or one of {', '.join(sorted(gates))}")
    kind = gates[name]
    chosen = dict(options)
    if kind.decides_capacity:
        chosen["capacity_factor"] = capacity_factor
    known = inspect.signature(kind).parameters
    for option, value in given.items():
        if value is None:
            continue
        if option not in known:
            raise ValueError(
                f"{option} ({value!r}) must be left out with gate={name!r}: it has no such option"
            )
        chosen[option] = value
    return kind(*sizes, **chosen)
