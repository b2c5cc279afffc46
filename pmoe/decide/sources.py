"""The choice of where a call's row counts come from (how many rows go from each rank to each expert)."""

from __future__ import annotations

from pmoe.call.call import Call
from pmoe.call.decision import CountsSource


def counts_source(call: Call) -> CountsSource:
    """Routes a call and returns the source of its row counts: the first of four that is possible.

    Row counts say how many rows each rank sends to each expert. The four sources, in the order in which they
    are tried:

        OneRankCounts   only one rank takes part, and GPU kernels compute the call. The counts stay on the
                        device
        PaddedCounts    the layer has pad_to_capacity: every count equals the capacity
        FusedCounts     the layer asks for fused kernels: ranks exchange counts, and the host waits for them
        ExactCounts     all other calls: ranks exchange counts, and the host waits for them
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
