"""The old name of `pmoe.measure.module_cost`, kept for one release."""

from pmoe.measure.module_cost import profile_module
from pmoe.warn import warn_of_old_name

__all__ = ["profile_module"]

warn_of_old_name("pmoe.measure.black_box", "pmoe.measure.module_cost")
