"""Chooses the number of chunks n and the restore pair if the options leave them open.

A chunk is a micro-batch. The restore pair says whether the dispatched rows (T_DI) and the experts' hidden
activation (T_M) are kept, offloaded or made again for backward.

With a memory budget, n and the pair are chosen together. The result is the fastest choice whose memory stays
within the budget for any routing. Without a budget, the cost model chooses a pair, and then n is chosen. If
trials found n, trials then choose the pair again:

    option               value     how the pair or n is chosen
    memory_reuse (pair)  True      by a cost model, MPipeMoE's Eq. 10, and by trials if several pairs are
                                   nearly the fastest (`_cheapest_pair`)
                         others    the value fixes the pair
    pipeline (n)         True      by trials: timed runs of both passes
                         "solve"   by FSMoE's solver
                         a number  the value fixes n
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.call.sizes import agreed_sizes, copies_at_most
from pmoe.choose.part_of_batch import (
    from_first_with_enough_memory,
    measure_in_little_memory,
    part_for_trial,
)
from pmoe.choose.search import degrees_by_search, n_with_enough_memory
from pmoe.choose.slots import without_host_offload
from pmoe.choose.solve import degrees_by_solver
from pmoe.choose.trials import TrialBatch, run_trials, smallest_with_enough_memory
from pmoe.comm.agreement import largest
from pmoe.comm.counts import RankCounts
from pmoe.engine.buffers.arena import pool
from pmoe.engine.passes.base import Inputs
from pmoe.measure.products import may_measure, measure_products
from pmoe.measure.profile import PROFILES
from pmoe.planner.degree import DEGREES, SOLVER_DEGREES, Choice, all_choices
from pmoe.planner.granularity import PassDegrees
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.priced_choices import Chooser, Measured, rounded_up, without_offload
from pmoe.planner.timed_rounds import OUT_OF_MEMORY
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once

T = TypeVar("T")

WRONG = 2.0
"""Largest factor by which the measured and the predicted seconds of a step may differ, up or down.

If the two differ by a larger factor, rank 0 warns that the measured rates from which the seconds were
predicted may be wrong.
"""

HOST_SECONDS = 2e-3
"""Seconds that a step may take in addition to `WRONG` times its predicted seconds, without a warning.

The work of the host may take these seconds. It is not predicted.
"""

PAIR_DEGREE = 4
"""Number of chunks with which restore pairs are compared if the solver chooses the number of chunks later.

Trials run on as many tokens as fit into the memory of the layer's smallest step, the step with the most
chunks. With two chunks, only about an eighth of the tokens would fit, too few to compare restore pairs.
"""

_compared: set[tuple[str, str]] = set()
"""The profiles that were already compared with a measured step: (name of the group, time of the measurement).

A profile has the measured rates of a machine. Several groups of ranks may read the same profile, and a rank
may belong to more than one of them. The key contains the group's name, because a comparison is collective:
either all ranks of a group make it, or none.
"""


def measure_products_of(modules: LayerModules, counts: RankCounts, inputs: Inputs) -> bool:
    """Measures which kernels compute the experts' matrix products fastest, if that is not known yet.

    Nothing is measured on the CPU, which has only one implementation. Collective if something is measured.
    Returns whether later calls of the layer with about so many rows need not ask again.

    modules: the modules and options of the layer.
    counts: the row counts, after the ranks have exchanged them.
    inputs: the rows and parameters of the call.
    """
    device = inputs.x_TM.device
    dtype = inputs.x_TM.dtype
    if device.type != "cuda":
        return True
    even_rows = counts.max_tokens * modules.options.top_k * modules.grid.esp.size
    for experts, rows in ((modules.experts, even_rows), (modules.shared_expert, counts.max_tokens)):
        if experts is not None:
            measure_products(experts, modules.ranks, dtype, device, rows, needs_grad=counts.needs_grad)
    return counts.max_tokens > 0 and may_measure()


def choose_among(batch: TrialBatch, restore: Restore | None) -> Choice:
    """Chooses the numbers of chunks of both passes and the restore pair, and returns them. Collective.

    The restore pair says whether the dispatched rows and the hidden activation are kept, offloaded or made
    again for backward.

    With a memory budget, the result is the fastest choice within the budget. Without a budget, the cost model
    chooses a pair. Trials (timed runs) or FSMoE's solver then choose the numbers of chunks. If trials found
    these numbers, trials then choose the pair again.

    batch: the routed batch, on which trials run.
    restore: the pair, if the caller has chosen it; None if this function chooses it.
    """
    modules = batch.modules
    options = modules.options
    counts = batch.counts
    if restore is None and options.budget is not None:
        choice = _within_budget(batch)
        if not options.solves:
            choice = _with_enough_memory(batch, choice, lambda: _choices_within_budget(batch))
            return _check_profile_with_a_step(batch, choice)
        restore = choice.restore  # the solver takes the numbers of chunks
    has_several_pairs = restore is None and len(modules.pairs) > 1 and counts.needs_grad
    n = options.fixed_degree
    if restore is not None:
        pair = restore
    elif not has_several_pairs:
        pair = without_host_offload(modules.pairs[0], counts)
    elif n is None and not options.solves:
        sizes = batch.sizes
        predicted = _chooser_of(batch).predicted_pair(sizes, counts.max_tokens, batch.profile)
        pair = without_host_offload(predicted, counts)
    else:
        n_forward = n or PAIR_DEGREE  # the solver chooses n after the pair
        degrees = PassDegrees(n_forward, options.pipeline_backward or n_forward)
        pair = without_host_offload(_cheapest_pair(batch, degrees), counts)
        if n is not None:
            every_pair = all_choices([(degrees.forward, degrees.backward)], modules.pairs)
            choice = Choice(**vars(degrees), restore=pair)
            pair = _with_enough_memory(batch, choice, lambda: every_pair).restore
    if n is not None:
        degrees_of_passes = PassDegrees(n, options.pipeline_backward or n)
    elif options.solves:

        def tried(degrees: Sequence[int]) -> Measured:
            return _tried(batch, all_choices([(n, n) for n in degrees], [pair]))

        degrees_of_passes = degrees_by_solver(batch, pair, tried)
        if batch.trials_allowed:
            degrees_of_passes = _solved_with_enough_memory(batch, pair, degrees_of_passes)
    else:
        degrees_of_passes = degrees_by_search(batch, pair)
        if has_several_pairs:
            cheapest = _cheapest_pair(batch, degrees_of_passes, one_is_taken=True)
            fastest = without_host_offload(cheapest, counts)
            if fastest != pair:  # the memory of a step with this pair is not tested yet
                pair = fastest
                degrees_of_passes = degrees_by_search(batch, pair)
    return _check_profile_with_a_step(batch, Choice(**vars(degrees_of_passes), restore=pair))


def _with_enough_memory(batch: TrialBatch, choice: Choice, others: Callable[[], Sequence[Choice]]) -> Choice:
    """Returns the choice, or the smallest choice if some rank has too little memory for a step with it.

    The smallest choice is the one that needs the least memory. Every rank allocates the memory of a step and
    frees it again. The layer remembers the result for batches of about the same size. Nothing is tested if no
    trials may run (`TrialBatch.may_try`). Collective the first time.

    batch: the routed batch.
    choice: the numbers of chunks and the restore pair that trials or predictions have found.
    others: returns all choices that the options allow.

    Raises OutOfMemoryError on every rank, with the bytes that would be enough, if some rank has too little
    memory even for the choice that needs the least.
    """
    if not batch.may_try:
        return choice

    def test() -> Choice:
        try:
            return from_first_with_enough_memory(batch, [choice])[0]
        except torch.OutOfMemoryError:  # raised on every rank
            return smallest_with_enough_memory(batch, others())

    return _remembered(batch, choice, test)


def _solved_with_enough_memory(batch: TrialBatch, pair: Restore, degrees: PassDegrees) -> PassDegrees:
    """Returns the solver's numbers of chunks, or larger ones if some rank has too little memory for them.

    The layer remembers the result for batches of about the same size. Collective the first time
    (`n_with_enough_memory`).

    batch: the routed batch.
    pair: the restore pair of the call: how backward gets the rows and the hidden activation.
    degrees: the numbers of chunks of both passes that the solver has found.
    """
    return _remembered(batch, (pair, degrees), lambda: n_with_enough_memory(batch, pair, degrees))


def _remembered(batch: TrialBatch, chosen: Hashable, test: Callable[[], T]) -> T:
    """Returns what a test of memory found for batches of about the same size; runs the test the first time.

    batch: the routed batch.
    chosen: what is tested.
    test: tests whether every rank has enough memory, and returns what is taken.
    """
    options = batch.modules.options
    tokens = rounded_up(batch.counts.max_tokens)
    key = ("enough memory", options, batch.inputs.x_TM.dtype, batch.hosted_copies, tokens, chosen)
    found = batch.modules.cache.choosers
    if key not in found:
        found[key] = test()
    result: T = found[key]
    return result


def _chooser_of(batch: TrialBatch) -> Chooser:
    """Returns the layer's `Chooser`, which chooses the number of chunks n and the restore pair.

    The restore pair says how backward gets the rows and the hidden activation. The chooser compares predicted
    seconds. It remembers its choices by number of tokens, so it chooses only once for batches of about the
    same size. The layer keeps one chooser for each set of options and each dtype of rows.

    batch: the routed batch.
    """
    modules = batch.modules
    options = modules.options
    # Bins are the equal parts of the batch in which rows are counted; a chunk consists of whole bins. With
    # the solver, no number of bins suits all numbers of chunks, so the seconds of each choice are predicted
    # with its own number of bins.
    bins = None if options.solves else modules.bins_for(options.degrees)
    new_chooser = Chooser(pairs=modules.pairs, budget=options.budget, slack=options.slack, bins=bins)
    key = ("predicted", options, batch.inputs.x_TM.dtype)
    chooser: Chooser = modules.cache.choosers.setdefault(key, new_chooser)
    return chooser


def _tried(
    batch: TrialBatch,
    choices: Sequence[Choice],
    one_is_taken: bool = False,
) -> Measured:
    """Returns the measured seconds of each choice; None if nothing could be measured.

    If any rank has too little memory for a choice, the entry of the choice is `OUT_OF_MEMORY`. The result is
    None if

    - trials (timed runs of both passes) may not run on this batch (`TrialBatch.may_try`);
    - too few tokens fit into the memory that trials may take (`measure_in_little_memory`);
    - every choice runs out of memory.

    batch: the routed batch.
    choices: the numbers of chunks and restore pairs to measure. A restore pair says how backward gets the
        rows and the hidden activation.
    one_is_taken: whether the step of this batch will run with one of ``choices``. Trials may then take as
        much memory as this step needs.
    """
    if not batch.may_try:
        return None
    batch = batch.counted_for(choices)
    try:
        measured = measure_in_little_memory(batch, choices, one_is_taken=one_is_taken)
    except torch.OutOfMemoryError:  # raised on every rank, so all ranks return None
        return None
    if not measured:
        return None
    return [measured.get(choice, OUT_OF_MEMORY) for choice in choices]


def copies_within_budget(modules: LayerModules, rows_TM: Tensor, max_tokens: int, per_rank: int) -> int:
    """Returns the most copies of busy experts that a rank may host within the memory budget.

    A restore pair says how backward gets the rows and the hidden activation. A number of copies is allowed if
    there is a number of chunks and a restore pair with which memory stays within the budget for any routing.
    Pairs that offload the dispatched rows (T_DI) do not count, because the host may have no memory for them.
    The number of tokens is rounded up, so that batches of similar sizes share one cached result. The result
    is equal on all ranks, because all ranks must plan the same copies.

    modules: the modules and options of the layer, which has a budget.
    rows_TM: (T, M), T rows with M = d_model columns, of which only the dtype and the device are used.
    max_tokens: number of tokens of the rank that has most.
    per_rank: the most copies that the options allow. The result is not larger.
    """
    options = modules.options
    tokens = rounded_up(max_tokens)
    key = ("copies", options, rows_TM.dtype, tokens)
    known = modules.cache.choosers
    if key not in known:
        known[key] = _copies_that_fit(modules, agreed_sizes(modules, rows_TM), tokens, per_rank)
    return int(known[key])


def _copies_that_fit(modules: LayerModules, sizes: LayerSizes, tokens: int, per_rank: int) -> int:
    """Returns the most copies of busy experts that a rank may host within the memory budget.

    `copies_within_budget` calls this function, and remembers its result.

    modules: the modules and options of the layer, which has a budget.
    sizes: sizes of the layer.
    tokens: number of tokens of the rank that has most.
    per_rank: the most copies that the options allow.
    """
    options = modules.options
    budget = options.budget
    assert budget is not None
    candidates = DEGREES if options.fixed_degree is None else (options.fixed_degree,)
    degrees = [(n, options.pipeline_backward or n) for n in candidates]
    any_host = all_choices(degrees, modules.pairs)
    chooser = Chooser(
        pairs=modules.pairs, budget=budget, slack=options.slack, bins=modules.bins_for(options.degrees)
    )
    for copies in range(per_rank, 0, -1):
        with_copies = replace(sizes, copies=copies_at_most(modules, copies))
        if all(chooser.fits(with_copies, tokens, some) for some in (any_host, without_offload(any_host))):
            return copies
    return 0


def _check_profile_with_a_step(batch: TrialBatch, choice: Choice) -> Choice:
    """Measures a step with the choice. Warns if the prediction was wrong. Returns the choice.

    The prediction uses a profile: the measured rates of this machine. If the measured and the predicted
    seconds differ by more than the factor `WRONG`, rank 0 warns that the profile may be wrong. Nothing is
    compared if there is no profile, if this profile was compared before, if trials (timed runs of both
    passes) may not run, or if a rank runs out of memory in the trial. Collective.

    batch: the routed batch, on which the step runs.
    choice: the numbers of chunks and the restore pair that were chosen. The restore pair says how backward
        gets the rows and the hidden activation.
    """
    x_TM = batch.inputs.x_TM
    ranks = batch.modules.ranks
    profile = PROFILES.get((ranks.name, x_TM.device, x_TM.dtype))
    if profile is None or not batch.may_try:
        return choice
    key = (ranks.name, profile.when)
    if key in _compared:
        return choice
    _compared.add(key)
    part = part_for_trial(batch.counted_for([choice]), choice)
    if part is None:
        return choice
    counts = part.counts
    times, failed = run_trials(part, [choice], 1)
    if failed:  # the same on all ranks. Only a comparison is lost, so the step goes on with its choice
        return choice
    timed = times[choice]
    seconds = step_seconds(part.sizes, profile, counts.max_tokens, choice)
    [rows] = largest(ranks, x_TM.device, [float(counts.recv.sum())], stage="comparing a profile with a step")
    # The prediction is for even routing; the measured step waits for the rank that receives most rows.
    seconds *= rows / (part.rows * part.modules.grid.esp.size)
    took = timed.forward + timed.backward
    if ranks.rank == 0 and not seconds / WRONG <= took <= WRONG * seconds + HOST_SECONDS:
        warn_once(
            f"the profile of {profile.when} is contradicted by the first steps, so choices may be wrong: "
            f"{seconds * 1e3:.3g} ms predicted, {took * 1e3:.3g} ms measured (`pmoe profile` renews it)"
        )
    return choice


def _cheapest_pair(batch: TrialBatch, degrees: PassDegrees, one_is_taken: bool = False) -> Restore:
    """Returns the fastest restore pair by the cost model; if several are nearly the fastest, by trials.

    The cost model is Eq. 10 of MPipeMoE. It predicts that a pass takes as long as the slowest of three
    things: computation, communication, and copies to or from the host. The rates of all three are measured on
    this machine. If the predictions of several pairs are close to the fastest, trials (timed runs of both
    passes) decide among these pairs (`Chooser.pair`). Nothing is tried twice for about the same number of
    tokens.

    The restore pair says whether the dispatched rows and the hidden activation are kept, offloaded or made
    again for backward.

    batch: the routed batch, on which trials run.
    degrees: the numbers of chunks of both passes with which trials compare pairs.
    one_is_taken: whether the step of this batch will run with these numbers of chunks. Trials may then take
        as much memory as this step needs.
    """

    def tried(pairs: Sequence[Restore]) -> Measured:
        choices = all_choices([(degrees.forward, degrees.backward)], pairs)
        return _tried(batch, choices, one_is_taken)

    return _chooser_of(batch).pair(batch.sizes, batch.counts.max_tokens, batch.profile, tried)


def _all_choices_of(batch: TrialBatch) -> list[Choice]:
    """Returns all numbers of chunks that the options allow, each with all restore pairs of the layer."""
    options = batch.modules.options
    numbers = SOLVER_DEGREES if options.solves else DEGREES
    if options.fixed_degree is not None:
        numbers = (options.fixed_degree,)
    return all_choices([(n, options.pipeline_backward or n) for n in numbers], batch.modules.pairs)


def _choices_within_budget(batch: TrialBatch) -> list[Choice]:
    """Returns the choices whose memory stays within the layer's budget for any routing of this batch."""
    chooser = _chooser_of(batch)
    choices = _all_choices_of(batch)
    if batch.counts.host_shortage:
        choices = without_offload(choices)
    sizes = batch.sizes
    return [choice for choice in choices if chooser.fits(sizes, batch.counts.max_tokens, [choice])]


def _within_budget(batch: TrialBatch) -> Choice:
    """Returns the fastest n and restore pair whose memory stays within the budget for any routing.

    The budget is the layer's option ``memory_budget``, in bytes of each rank. n is the number of chunks. The
    restore pair says whether the dispatched rows and the hidden activation are kept, offloaded or made again
    for backward.

    The choices that are predicted to be fast are compared by trials, timed runs of both passes. With
    ``pipeline="solve"`` there are no trials: the n and the pair with the fastest prediction are returned. The
    caller then uses only the pair, and lets the solver choose n.

    batch: the routed batch, on which trials run.

    Raises ValueError on every rank if no choice is within the budget. The message names the smallest budget
    that would be enough.
    """
    options = batch.modules.options
    counts = batch.counts
    pool(batch.inputs.x_TM.device).device.keep_at_most(options.budget or 0)
    choices = _all_choices_of(batch)

    def tried(candidates: Sequence[Choice]) -> Measured:
        return None if options.solves else _tried(batch, candidates)

    fitting = functools.partial(
        _chooser_of(batch).fitting, batch.sizes, counts.max_tokens, choices, batch.profile, tried
    )
    choice = fitting()
    if counts.host_shortage and choice.restore.dispatched == "offload":
        choice = fitting(host_is_full=True)
    return choice
