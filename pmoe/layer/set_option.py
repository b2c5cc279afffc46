"""An option set on a built layer: checked as when it was built, alone and beside the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pmoe.layer.build import check_together
from pmoe.layer.spec import Switches

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer

SIZES = ("d_model", "d_hidden", "num_experts", "top_k")
"""Options that stay: the layer's modules are made for them."""


def set_option(layer: MoELayer, name: str, value: object) -> None:
    """Raises what building the layer would raise, and changes nothing then; AttributeError for a switch."""
    if name in Switches.__dataclass_fields__:
        raise AttributeError(
            f"{name} ({value!r}) must be set in layer.switches: layer.switches = Switches({name}={value!r})"
        )
    before = layer.spec
    found = replace(before, **{name: value})  # type: ignore[arg-type]
    if name in SIZES and found != before:
        raise ValueError(f"{name} ({value!r}) must stay {getattr(before, name)}, as the layer was built")
    layer.spec = found
    try:
        check_together(layer.parts, layer.shared_expert)
    except ValueError:
        layer.spec = before
        raise
