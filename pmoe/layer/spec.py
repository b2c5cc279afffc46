"""The old name of `pmoe.call.options`, kept for one release."""

from pmoe.call.options import FusedName, Switches
from pmoe.call.options import LayerOptions as LayerSpec
from pmoe.warn import warn_of_old_name

__all__ = ["FusedName", "LayerSpec", "Switches"]

warn_of_old_name("pmoe.layer.spec", "pmoe.call.options")
