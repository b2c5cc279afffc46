"""The choice of a call's source of row counts."""

from __future__ import annotations

from pmoe.call.call import Call
from pmoe.call.decision import CountsSource


def counts_source(call: Call) -> CountsSource:
    """Routes a call and returns its source of row counts: the first of the following that fits.

    The host waits for the device only if ranks exchange counts:

        OneRankCounts   no other rank takes part, and kernels take the call: no counts reach the host
        PaddedCounts    pad_to_capacity: the capacity gives every count in advance
        FusedCounts     fused kernels are wanted: ranks exchange counts
        ExactCounts     otherwise: ranks exchange counts
    """
    modules = call.modules
    if modules.may_run_on_one_rank:
        from pmoe.decide.one_rank_counts import OneRankCounts

        source = OneRankCounts.of(call)
        if source is not None:
            return source
    if modules.options.pad_to_capacity:
        from pmoe.decide.padded_counts import PaddedCounts

        return PaddedCounts(call)
    if modules.options.fused:
        from pmoe.decide.fused_counts import FusedCounts

        return FusedCounts(call)
    from pmoe.decide.exact_counts import ExactCounts

    return ExactCounts(call)
