"""The old name of `pmoe.layer.moe_layer`, kept for one release."""

from pmoe.layer.moe_layer import MoELayer
from pmoe.warn import warn_of_old_name

__all__ = ["MoELayer"]

warn_of_old_name("pmoe.layer.module", "pmoe.layer.moe_layer")
