"""n and the restore pair where options leave a choice.

- the cheapest pair by MPipeMoE's Eq. 10;
- the fastest n and pair within a memory budget;
- n by trials (``pipeline=True``);
- n by FSMoE's solver (``pipeline="solve"``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pmoe.call.modules import Parts
from pmoe.choose.search import tried_degrees
from pmoe.choose.slots import with_room
from pmoe.choose.solve import solved_degrees
from pmoe.choose.trials import Batch, tried_seconds
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

WRONG, HOST_SECONDS = 2.0, 2e-3
"""A profile is contradicted by steps that take so many times what it predicts, or the reciprocal. The host
may add so many seconds to a step."""

_compared: set[str] = set()  # when profiles were measured


def measure_products_of(parts: Parts, counts: RankCounts, inputs: Inputs) -> None:
    """Has the ways to compute the experts' products measured where that has not been done."""
    device, dtype = inputs.x_TM.device, inputs.x_TM.dtype
    if device.type != "cuda":  # else there is one way only
        return
    even_rows = counts.max_tokens * parts.spec.top_k * parts.grid.inside.size
    for experts, rows in ((parts.experts, even_rows), (parts.shared_expert, counts.max_tokens)):
        if experts is not None:
            measure_products(experts, parts.ranks, dtype, device, rows, needs_grad=counts.needs_grad)


def choose_among(batch: Batch, restore: Restore | None) -> Choice:
    """As `pmoe.choose.choose.choose`."""
    parts, spec, counts = batch.parts, batch.parts.spec, batch.counts
    if restore is None and spec.budget is not None:
        return _compared_with_steps(batch, _within_budget(batch))
    if restore is None:
        several = len(parts.pairs) > 1 and counts.needs_grad
        restore = with_room(_cheapest_pair(batch) if several else parts.pairs[0], counts)
    n = spec.fixed_degree
    if n is not None:
        found = PassDegrees(n, spec.pipeline_backward or n)
    elif spec.pipeline == SOLVE:

        def tried(degrees: Sequence[int]) -> Measured:
            return _tried(batch, all_choices([(n, n) for n in degrees], [restore]))

        found = solved_degrees(batch, restore, tried)
    else:
        found = tried_degrees(batch, restore)
    return _compared_with_steps(batch, Choice(**vars(found), restore=restore))


def _chooser_of(batch: Batch) -> Chooser:
    """The layer's for these options and this type of rows, which remembers what it has chosen."""
    parts, spec = batch.parts, batch.parts.spec
    new = Chooser(pairs=parts.pairs, budget=spec.budget, slack=spec.slack, bins=parts.num_bins)
    key = ("predicted", spec, batch.inputs.x_TM.dtype)
    found: Chooser = parts.known.choosers.setdefault(key, new)
    return found


def _tried(batch: Batch, choices: Sequence[Choice]) -> Measured:
    """None where trials are not for this layer."""
    if not batch.may_be_tried or batch.parts.gradients is not None or batch.counts.host_shortage:
        return None  # a choice that offloads would fail on the rank alone whose host is full
    return tried_seconds(batch, choices)


def _compared_with_steps(batch: Batch, choice: Choice) -> Choice:
    """The choice. Once for each profile in use, rank 0 warns where real steps contradict it. Collective."""
    counts, x_TM, ranks = batch.counts, batch.inputs.x_TM, batch.parts.ranks
    profile = PROFILES.get((ranks.name, x_TM.device, x_TM.dtype))
    if profile is None or profile.when in _compared or (measured := _tried(batch, [choice])) is None:
        return choice
    _compared.add(profile.when)
    seconds = step_seconds(batch.sizes, profile, counts.max_tokens, choice)
    [rows] = largest(ranks, x_TM.device, [float(counts.recv.sum())], stage="comparing a profile with a step")
    seconds *= rows / (batch.rows * batch.parts.grid.inside.size)  # of the fullest rank
    took = sum(measured[0])
    if ranks.rank == 0 and not seconds / WRONG <= took <= WRONG * seconds + HOST_SECONDS:
        warn_once(
            f"the profile of {profile.when} is contradicted by the first steps, so choices may be wrong: "
            f"{seconds * 1e3:.3g} ms predicted, {took * 1e3:.3g} ms measured (`pmoe profile` renews it)"
        )
    return choice


def _cheapest_pair(batch: Batch) -> Restore:
    """MPipeMoE's Eq. 10, on measured rates."""
    spec = batch.parts.spec
    n, m = spec.fixed_degree or 2, spec.pipeline_backward  # 2 where n follows the pair

    def tried(pairs: Sequence[Restore]) -> Measured:
        return _tried(batch, all_choices([(n, m or n)], pairs))

    return _chooser_of(batch).pair(batch.sizes, batch.counts.max_tokens, batch.profile, tried)


def _within_budget(batch: Batch) -> Choice:
    """The fastest n and pair whose bytes hold the budget for any routing. Raises ValueError, on every rank,
    that says what the least budget would be."""
    spec, counts = batch.parts.spec, batch.counts
    pool(batch.inputs.x_TM.device).device.keep_at_most(spec.budget or 0)
    candidates = DEGREES if spec.fixed_degree is None else (spec.fixed_degree,)
    choices = all_choices([(n, spec.pipeline_backward or n) for n in candidates], batch.parts.pairs)
    tried = functools.partial(_tried, batch)
    fitting = functools.partial(
        _chooser_of(batch).fitting, batch.sizes, counts.max_tokens, choices, batch.profile, tried
    )
    choice = fitting()
    if counts.host_shortage and choice.restore.dispatched == "offload":
        choice = fitting(host_is_full=True)
    return choice
