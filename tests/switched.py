"""A layer from one table of options, some of which are switches that exist to measure."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pmoe import MoELayer
from pmoe.call.options import Switches

NAMES = frozenset(field.name for field in fields(Switches))


def switched_layer(*sizes: Any, **options: Any) -> MoELayer:
    """A layer by `MoELayer`'s arguments and, among them, the fields of `Switches`."""
    switches = {name: options.pop(name) for name in NAMES & options.keys()}
    layer = MoELayer(*sizes, **options)
    if switches:
        layer.switches = Switches(**switches)
    return layer
