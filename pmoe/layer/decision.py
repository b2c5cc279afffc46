"""The old name of `pmoe.call.decision`, kept for one release."""

from pmoe.call.decision import HostRowCounts as CallCounts
from pmoe.call.decision import LastCall
from pmoe.call.decision import RunReport as Ran
from pmoe.warn import warn_of_old_name

__all__ = ["CallCounts", "LastCall", "Ran"]

warn_of_old_name("pmoe.layer.decision", "pmoe.call.decision")
