"""n by FSMoE's solver: what ``pipeline="solve"`` takes."""

from __future__ import annotations

from pmoe.layer.choose import Batch
from pmoe.layer.memory import memory_shape
from pmoe.planner.granularity import PassDegrees
from pmoe.runners.solved import Solver
from pmoe.schedule.restore import Restore


def degrees(batch: Batch, restore: Restore) -> PassDegrees:
    """For the largest number of any rank's tokens. Collective the first time."""
    parts, rows_TM = batch.parts, batch.inputs.x_TM
    if parts.ranks.size == 1:
        return PassDegrees(1, 1)
    key = ("solved", parts.spec, restore, rows_TM.dtype)
    if key not in parts.known.choosers:
        parts.known.choosers[key] = Solver(
            parts.grid, restore if parts.spec.rotates else None, parts.spec.switches.one_lane
        )
    solver: Solver = parts.known.choosers[key]
    modules = parts.experts.as_modules()
    t_gar = 0.0 if parts.gradients is None else parts.gradients.t_gar
    return solver.degrees(memory_shape(parts, rows_TM), rows_TM, batch.counts.max_tokens, t_gar, modules)
