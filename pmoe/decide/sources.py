"""The choice of a call's source of row counts."""

from __future__ import annotations

from pmoe.call.call import Call
from pmoe.call.decision import CountsSource


def counts_source(call: Call) -> CountsSource:
    """Routes a call by the first of these sources that fits it:

    - the kernels of one rank, if no other rank takes part: no counts reach the host;
    - the capacity, if ``pad_to_capacity`` makes every count known in advance;
    - an exchange among all ranks, for which the host waits once.
    """
    parts = call.parts
    if parts.may_run_on_one_rank:
        from pmoe.decide.one_rank_counts import OneRankCounts

        source = OneRankCounts.of(call)
        if source is not None:
            return source
    if parts.spec.pad_to_capacity:
        from pmoe.decide.padded_counts import PaddedCounts

        return PaddedCounts(call)
    if parts.spec.fused:
        from pmoe.decide.fused_counts import FusedCounts

        return FusedCounts(call)
    from pmoe.decide.exact_counts import ExactCounts

    return ExactCounts(call)
