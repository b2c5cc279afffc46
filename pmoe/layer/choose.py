"""What a call chooses: n of both passes and the restore pair, from numbers that all ranks share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from pmoe.comm.counts import Shared, Slots
from pmoe.engine.arena import pool
from pmoe.engine.passes import Inputs
from pmoe.engine.plan import Plan
from pmoe.experts import ModuleExperts
from pmoe.layer.plans import PlanFor
from pmoe.measure.profile import profile_of
from pmoe.planner.chooser import Choice
from pmoe.planner.degree import DEGREES, LEAST_ROWS, SOLVE, adaptive_degree, fixed_degree
from pmoe.planner.granularity import PassDegrees
from pmoe.planner.profile import Profile
from pmoe.runners.searched import search
from pmoe.runners.solved import Solver
from pmoe.schedule.restore import Restore
from pmoe.schedule.slots import ALIGNMENT
from pmoe.warn import warn_once

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def ask_slots(layer: MoELayer, x_TM: Tensor) -> Slots:
    """What to ask about chunks: how deep each n must be cut, and whether the host has room for T_DI."""
    host_rows = None
    if layer.may_offload_rows:
        # Every unit of a chunk, travelling or not, starts on a boundary of its own.
        free = pool(x_TM.device).host.free_bytes - 2 * layer.num_bins * ALIGNMENT
        host_rows = max(free, 0) // (layer.d_model * x_TM.element_size())
    return Slots(
        slack=layer.slack,
        top_k=layer.top_k * layer.grid.inside.size,
        degrees=layer.degree_candidates,
        own_rank=layer.ranks.rank if layer.stages.local else None,
        host_rows=host_rows,
    )


def choose(
    layer: MoELayer,
    shared: Shared,
    plan_for: PlanFor,
    inputs: Inputs,
) -> Choice:
    """n of both passes and the restore pair, from numbers that all ranks share."""
    chooser, most, rows_TM = layer.chooser, shared.max_tokens, inputs.x_TM

    def profile() -> Profile:
        return profile_of(layer.ranks, rows_TM.device, rows_TM.dtype)

    forward = fixed_degree(layer.pipeline)
    if chooser.budget is not None:
        shape = layer.memory_shape(rows_TM)
        degrees = [(n, layer.pipeline_backward or n) for n in (DEGREES if forward is None else (forward,))]
        choice = chooser.fitting(shape, most, degrees, profile)
        if shared.host_shortage and choice.restore.dispatched == "offload":
            choice = chooser.fitting(shape, most, degrees, profile, host_is_full=True)
        return choice
    restore = chooser.pairs[0]
    if len(chooser.pairs) > 1 and shared.needs_grad:
        restore = chooser.pair(layer.memory_shape(rows_TM), most, profile)
    if shared.host_shortage and restore.dispatched == "offload":
        restore = Restore("communicate", restore.hidden)
        if shared.needs_grad:  # else nothing is offloaded at all
            warn_once("too little host memory is left on some rank to offload T_DI: it is sent again instead")
    found = choose_degrees(layer, shared, restore, plan_for, inputs)
    return Choice(forward=found.forward, backward=found.backward, restore=restore)


def choose_degrees(
    layer: MoELayer,
    shared: Shared,
    restore: Restore,
    plan_for: PlanFor,
    inputs: Inputs,
) -> PassDegrees:
    forward = fixed_degree(layer.pipeline)
    if layer.pipeline == SOLVE:
        return _solved(layer, restore, inputs.x_TM, shared.max_tokens)
    if forward is None:
        return _searched(layer, shared, restore, plan_for, inputs)
    return PassDegrees(forward, layer.pipeline_backward or forward)


def _solved(layer: MoELayer, restore: Restore, rows_TM: Tensor, most: int) -> PassDegrees:
    """What pipeline="solve" takes for ``most`` tokens of a rank."""
    if layer.ranks.size == 1:
        return PassDegrees(1, 1)
    key = (layer.rotates, restore, layer.one_lane)
    if layer._solver is None or layer._solver[0] != key:
        layer._solver = (key, Solver(layer.grid, restore if layer.rotates else None, layer.one_lane))
    modules = layer.experts.local if isinstance(layer.experts, ModuleExperts) else ()
    return layer._solver[1].degrees(layer.memory_shape(rows_TM), rows_TM, most, layer.t_gar, list(modules))


def _searched(
    layer: MoELayer,
    shared: Shared,
    restore: Restore,
    plan_for: PlanFor,
    inputs: Inputs,
) -> PassDegrees:
    """What pipeline=True takes: n known for this many tokens, or found by trials where they are worth it.

    Where nothing is differentiated, chunks would be small, nothing travels, or experts are modules, which a
    trial might change, a rule decides instead.
    """
    most = shared.max_tokens
    rows = most * layer.top_k
    ruled = adaptive_degree(rows, 2 if layer.rotates else layer.ranks.size)
    known = layer.granularity
    found = known.lookup(most)
    if found is not None:
        return found
    worth = shared.needs_grad and layer.ranks.size > 1 and rows >= 2 * LEAST_ROWS
    modules = isinstance(layer.experts, ModuleExperts) or isinstance(layer.shared_expert, ModuleExperts)
    if not worth or modules or layer.hooks or layer.sequential:
        return PassDegrees(ruled, ruled)

    def plan_of(degrees: PassDegrees) -> Plan | None:
        if degrees.forward != degrees.backward and (not layer.rotates or layer.send_once):
            return None
        return plan_for(degrees.forward, degrees.backward, restore)

    traffic = replace(layer.traffic)
    found = search(known, most, layer.degree_candidates, plan_of, inputs, layer.ranks)
    vars(layer.traffic).update(vars(traffic))  # trials are no traffic of the model
    return found
