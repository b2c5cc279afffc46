"""Choices by prediction: the cheapest restore pair by Eq. 10, n and the pair within a memory budget, and n of
``pipeline="solve"``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pmoe.engine.arena import pool
from pmoe.layer.choose import Batch
from pmoe.layer.memory import memory_shape
from pmoe.layer.searched import tried_seconds
from pmoe.measure.profile import profile_of
from pmoe.planner.candidates import Chooser
from pmoe.planner.degree import DEGREES, Choice
from pmoe.planner.granularity import PassDegrees
from pmoe.schedule.restore import Restore


def chooser_of(batch: Batch) -> Chooser:
    """The layer's for these options and this type of rows, which remembers what it has chosen."""
    parts, spec = batch.parts, batch.parts.spec
    new = Chooser(pairs=parts.pairs, budget=spec.budget, slack=spec.slack, bins=parts.num_bins)
    key = ("predicted", spec, batch.inputs.x_TM.dtype)
    found: Chooser = parts.known.choosers.setdefault(key, new)
    return found


def pair_of_batch(batch: Batch) -> Restore:
    """MPipeMoE's Eq. 10, on measured rates."""
    parts, rows_TM = batch.parts, batch.inputs.x_TM
    profile = functools.partial(profile_of, parts.ranks, rows_TM.device, rows_TM.dtype)
    n, m = parts.spec.fixed_degree or 2, parts.spec.pipeline_backward  # 2 where n follows the pair

    def tried(pairs: Sequence[Restore]) -> list[tuple[float, float]] | None:
        return tried_seconds(batch, [Choice(forward=n, backward=m or n, restore=pair) for pair in pairs])

    return chooser_of(batch).pair(memory_shape(parts, rows_TM), batch.counts.max_tokens, profile, tried)


def choice_within_budget(batch: Batch) -> Choice:
    """The fastest n and pair whose bytes hold the budget for any routing. Raises ValueError, on every rank,
    that says what the least budget would be."""
    parts, spec, counts, rows_TM = batch.parts, batch.parts.spec, batch.counts, batch.inputs.x_TM
    profile = functools.partial(profile_of, parts.ranks, rows_TM.device, rows_TM.dtype)
    pool(rows_TM.device).device.keep_at_most(spec.budget or 0)
    chooser, shape, max_tokens = chooser_of(batch), memory_shape(parts, rows_TM), counts.max_tokens
    candidates = DEGREES if spec.fixed_degree is None else (spec.fixed_degree,)
    degrees = [(n, spec.pipeline_backward or n) for n in candidates]
    tried = functools.partial(tried_seconds, batch)
    choice = chooser.fitting(shape, max_tokens, degrees, profile, tried)
    if counts.host_shortage and choice.restore.dispatched == "offload":
        choice = chooser.fitting(shape, max_tokens, degrees, profile, tried, host_is_full=True)
    return choice


def solved_degrees(batch: Batch, restore: Restore) -> PassDegrees:
    """n by FSMoE's solver, for the largest number of any rank's tokens. Collective the first time."""
    from pmoe.runners.solved import Solver

    parts, rows_TM = batch.parts, batch.inputs.x_TM
    if parts.ranks.size == 1:
        return PassDegrees(1, 1)
    key = ("solved", parts.spec, restore, rows_TM.dtype)
    new = Solver(parts.grid, restore if parts.spec.rotates else None, parts.spec.switches.one_lane)
    solver: Solver = parts.known.choosers.setdefault(key, new)
    modules = parts.experts.as_modules()
    t_gar = 0.0 if parts.gradients is None else parts.gradients.t_gar
    shape, tokens = memory_shape(parts, rows_TM), batch.counts.max_tokens

    def tried(degrees: Sequence[int]) -> list[tuple[float, float]] | None:
        return tried_seconds(batch, [Choice(forward=n, backward=n, restore=restore) for n in degrees])

    return solver.degrees(shape, rows_TM, tokens, t_gar, modules, tried)
