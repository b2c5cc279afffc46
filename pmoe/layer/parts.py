"""The old name of `pmoe.call.modules`, kept for one release."""

from pmoe.call.modules import LayerCache as Known
from pmoe.call.modules import LayerModules as Parts
from pmoe.warn import warn_of_old_name

__all__ = ["Known", "Parts"]

warn_of_old_name("pmoe.layer.parts", "pmoe.call.modules")
