"""The choice of n and the restore pair if the options leave it open.

With a memory budget, both are chosen together: the fastest n and pair that stay within it for any routing.
Without one, the pair comes first, then n:

    pair   fixed by ``memory_reuse``, or with True the cheapest by MPipeMoE's Eq. 10
    n      fixed by ``pipeline``, with True found by trials, with "solve" by FSMoE's solver
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pmoe.call.modules import LayerModules
from pmoe.choose.search import degrees_by_search
from pmoe.choose.slots import without_host_offload
from pmoe.choose.solve import degrees_by_solver
from pmoe.choose.trials import TrialBatch, measure_trials
from pmoe.comm.agreement import largest
from pmoe.comm.counts import RankCounts
from pmoe.engine.buffers.arena import pool
from pmoe.engine.passes.base import Inputs
from pmoe.measure.products import measure_products
from pmoe.measure.profile import PROFILES
from pmoe.planner.degree import DEGREES, SOLVE, Choice, all_choices
from pmoe.planner.granularity import PassDegrees
from pmoe.planner.layer_seconds import step_seconds
from pmoe.planner.priced_choices import Chooser, Measured
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once

WRONG = 2.0
"""A profile is wrong if a step takes this many times the seconds that it predicts, or less than the
reciprocal."""

HOST_SECONDS = 2e-3
"""Seconds that the host may add to a step."""

_compared: set[str] = set()
"""The times at which profiles were measured that were compared with a step already."""


def measure_products_of(modules: LayerModules, counts: RankCounts, inputs: Inputs) -> None:
    """Measures the ways to compute the experts' products, if that was not done before. Collective then."""
    device = inputs.x_TM.device
    dtype = inputs.x_TM.dtype
    if device.type != "cuda":  # on the CPU there is one way only
        return
    even_rows = counts.max_tokens * modules.options.top_k * modules.grid.esp.size
    for experts, rows in ((modules.experts, even_rows), (modules.shared_expert, counts.max_tokens)):
        if experts is not None:
            measure_products(experts, modules.ranks, dtype, device, rows, needs_grad=counts.needs_grad)


def choose_among(batch: TrialBatch, restore: Restore | None) -> Choice:
    """Returns n of both passes and the restore pair, chosen as the module's docstring says. Collective.

    batch: the routed batch, on which trials run.
    restore: the pair, if it is chosen already; None lets this function choose it.
    """
    modules = batch.modules
    options = modules.options
    counts = batch.counts
    if restore is None and options.budget is not None:
        return _compared_with_steps(batch, _within_budget(batch))
    if restore is None:
        has_several_pairs = len(modules.pairs) > 1 and counts.needs_grad
        restore = without_host_offload(
            _cheapest_pair(batch) if has_several_pairs else modules.pairs[0], counts
        )
    n = options.fixed_degree
    if n is not None:
        degrees_of_passes = PassDegrees(n, options.pipeline_backward or n)
    elif options.pipeline == SOLVE:

        def tried(degrees: Sequence[int]) -> Measured:
            return _tried(batch, all_choices([(n, n) for n in degrees], [restore]))

        degrees_of_passes = degrees_by_solver(batch, restore, tried)
    else:
        degrees_of_passes = degrees_by_search(batch, restore)
    return _compared_with_steps(batch, Choice(**vars(degrees_of_passes), restore=restore))


def _chooser_of(batch: TrialBatch) -> Chooser:
    """Returns the layer's chooser for these options and this type of rows. It remembers its choices."""
    modules = batch.modules
    options = modules.options
    new_chooser = Chooser(
        pairs=modules.pairs, budget=options.budget, slack=options.slack, bins=modules.num_bins
    )
    key = ("predicted", options, batch.inputs.x_TM.dtype)
    chooser: Chooser = modules.cache.choosers.setdefault(key, new_chooser)
    return chooser


def _tried(batch: TrialBatch, choices: Sequence[Choice]) -> Measured:
    """Returns the measured seconds of choices; None if this layer or batch allows no trials."""
    if not batch.trials_allowed or batch.modules.gradients is not None or batch.counts.host_shortage:
        return None  # with a full host, a choice that offloads would fail on that rank alone
    return measure_trials(batch, choices)


def _compared_with_steps(batch: TrialBatch, choice: Choice) -> Choice:
    """Returns the choice. Rank 0 warns once for each profile that a real step contradicts. Collective."""
    counts = batch.counts
    x_TM = batch.inputs.x_TM
    ranks = batch.modules.ranks
    profile = PROFILES.get((ranks.name, x_TM.device, x_TM.dtype))
    if profile is None or profile.when in _compared or (measured := _tried(batch, [choice])) is None:
        return choice
    _compared.add(profile.when)
    seconds = step_seconds(batch.sizes, profile, counts.max_tokens, choice)
    [rows] = largest(ranks, x_TM.device, [float(counts.recv.sum())], stage="comparing a profile with a step")
    seconds *= rows / (batch.rows * batch.modules.grid.esp.size)  # of the fullest rank
    took = sum(measured[0])
    if ranks.rank == 0 and not seconds / WRONG <= took <= WRONG * seconds + HOST_SECONDS:
        warn_once(
            f"the profile of {profile.when} is contradicted by the first steps, so choices may be wrong: "
            f"{seconds * 1e3:.3g} ms predicted, {took * 1e3:.3g} ms measured (`pmoe profile` renews it)"
        )
    return choice


def _cheapest_pair(batch: TrialBatch) -> Restore:
    """Returns the cheapest pair by MPipeMoE's Eq. 10, on measured rates."""
    options = batch.modules.options
    n = options.fixed_degree or 2  # 2 if n is chosen after the pair
    n_backward = options.pipeline_backward or n

    def tried(pairs: Sequence[Restore]) -> Measured:
        return _tried(batch, all_choices([(n, n_backward)], pairs))

    return _chooser_of(batch).pair(batch.sizes, batch.counts.max_tokens, batch.profile, tried)


def _within_budget(batch: TrialBatch) -> Choice:
    """Returns the fastest n and pair whose bytes stay within the budget for any routing.

    Raises ValueError on every rank if there is none. It names the smallest budget that would do.
    """
    options = batch.modules.options
    counts = batch.counts
    pool(batch.inputs.x_TM.device).device.keep_at_most(options.budget or 0)
    candidates = DEGREES if options.fixed_degree is None else (options.fixed_degree,)
    choices = all_choices([(n, options.pipeline_backward or n) for n in candidates], batch.modules.pairs)
    tried = functools.partial(_tried, batch)
    fitting = functools.partial(
        _chooser_of(batch).fitting, batch.sizes, counts.max_tokens, choices, batch.profile, tried
    )
    choice = fitting()
    if counts.host_shortage and choice.restore.dispatched == "offload":
        choice = fitting(host_is_full=True)
    return choice
