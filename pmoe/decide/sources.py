"""Chooses the source of a call's row counts: the object that knows how many rows go to each expert."""

from __future__ import annotations

from pmoe.call.call import Call
from pmoe.call.decision import CountsSource


def counts_source(call: Call) -> CountsSource:
    """Routes a call and returns the source of its row counts: the first of nine that is possible.

    Row counts say how many rows each rank sends to each expert. These are the nine sources, in the order in
    which they are tried:

        OneRankCounts   only one rank takes part, and GPU kernels compute the call. The counts stay on the
                        device
        BoundedProgramCounts
                        `pmoe.BoundedSteps` bounds the layer's rows, and ranks have agreed on the bound of its
                        compiled programs: the counts stay on the device
        ProgramCounts   compiled programs may run the call: ranks exchange counts, and agree on the programs
        PaddedCounts    the layer has pad_to_capacity: every count equals the capacity
        BalancedCounts  the layer has balance: ranks exchange counts. If any expert gets a copy on another
                        rank, they exchange counts a second time
        BoundedCounts   the same as BoundedProgramCounts, for the kernels of a layer with fused="persistent"
        FusedCounts     the layer asks for fused kernels: ranks exchange counts, and the host waits for them
        SolverCounts    the layer has pipeline="solve": ranks exchange counts for the last call's numbers of
                        chunks. If the solver then chooses other numbers, they exchange counts a second time
        ExactCounts     all other calls: ranks exchange counts, and the host waits for them
    """
    modules = call.modules
    if modules.may_run_on_one_rank:
        from pmoe.decide.one_rank_counts import OneRankCounts

        source = OneRankCounts.of(call)
        if source is not None:
            return source
    if modules.options.needs_special_source:
        return _special_source(call)
    if modules.options.pad_to_capacity:
        from pmoe.decide.padded_counts import PaddedCounts

        return PaddedCounts(call)
    from pmoe.decide.exact_counts import ExactCounts

    return ExactCounts(call)


def _special_source(call: Call) -> CountsSource:
    """Returns the source of row counts of a layer with programs, ``balance``, ``fused`` or "solve"."""
    if call.modules.options.switches.program:
        from pmoe.decide.program_choice import takes_layer
        from pmoe.decide.program_counts import ProgramCounts, ProgramSolverCounts

        if takes_layer(call.modules):
            if call.modules.cache.row_bound is not None:
                from pmoe.decide.bounded_program_counts import bounded_program_source

                bounded = bounded_program_source(call, call.modules.cache.row_bound)
                if bounded is not None:
                    return bounded
            return (ProgramSolverCounts if call.modules.options.solves else ProgramCounts)(call)
    if call.modules.options.pad_to_capacity:
        from pmoe.decide.padded_counts import PaddedCounts

        return PaddedCounts(call)
    if call.modules.options.balance and call.modules.grid.ep.size > 1:
        from pmoe.decide.balanced_counts import BalancedCounts, BalancedSolverCounts

        return (BalancedSolverCounts if call.modules.options.solves else BalancedCounts)(call)
    bound = call.modules.cache.row_bound
    if bound is not None and call.modules.options.fused:
        from pmoe.decide.bounded_counts import bounded_source

        source = bounded_source(call, bound)
        if source is not None:
            return source
    if call.modules.options.fused:
        from pmoe.decide.fused_counts import FusedCounts, FusedSolverCounts

        return (FusedSolverCounts if call.modules.options.solves else FusedCounts)(call)
    if call.modules.options.solves:
        from pmoe.decide.solver_counts import SolverCounts

        return SolverCounts(call)
    from pmoe.decide.exact_counts import ExactCounts

    return ExactCounts(call)
