"""The choice of fused kernels: which calls of a layer they compute, and the runner of those calls.

A fused kernel overlaps communication with the experts' matrix products inside one launch. There are two
kinds:

- COMET's kernels, if ``fused`` is True, "forward" or "auto";
- FlashDMoE's persistent kernels, one launch for each pass, if ``fused="persistent"``.

If the fused kernels cannot compute a call, all ranks run the call in chunks (micro-batches). pmoe then warns
once for each reason, except with ``fused="auto"``.

Three functions look for reasons against fused kernels, in the order of the table. Each gives the same answer
on all ranks. The table says what they examine:

    fused_refusal   options and modules of the layer (`pmoe.call.modules.LayerModules`)
    may_fuse        dtype and device of the rows
    find_steps      row counts, and the kernels and memory of all ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.module_calls import is_watched
from pmoe.call.modules import LayerModules
from pmoe.comm.counts import RankCounts
from pmoe.decide.route import cast_dtype
from pmoe.engine.passes.base import Inputs
from pmoe.experts.stacked import StackedExperts
from pmoe.gates.logits import Logits, router_logits
from pmoe.gates.topk import TopKGate
from pmoe.kernels import route
from pmoe.kernels.comet.backend import Steps
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.flashdmoe import MOST_CHOICES, MOST_EXPERTS, RoutingInput
from pmoe.kernels.operands import memory_misfit
from pmoe.kernels.route import DeferredRouting
from pmoe.runners import fused_steps, one_rank
from pmoe.runners.features import Feature, refused
from pmoe.runners.fused import FusedRunner, KernelsRunner, PersistentRunner
from pmoe.schedule.restore import KEEP, Restore
from pmoe.warn import warn_once


def is_persistent(modules: LayerModules) -> bool:
    """Returns whether a layer asks for FlashDMoE's persistent kernel (``fused="persistent"``)."""
    return modules.options.fused == "persistent"


def stacked(modules: LayerModules) -> StackedExperts:
    """Returns the layer's experts with the type `StackedExperts`, which type checkers need to know.

    Stacked experts have one tensor for the first matrices of all experts of this rank, and one for the second
    matrices. Fused kernels compute only these. The callers have checked that the layer has stacked experts.
    """
    assert isinstance(modules.experts, StackedExperts)
    return modules.experts


def fused_pair(modules: LayerModules) -> Restore | None:
    """Returns the restore pair that fused kernels use: the first allowed pair without offloading.

    A restore pair says how backward gets two activations back: the rows that the experts received, and the
    hidden activation. Fused kernels cannot offload to the host. The result is None if the options allow only
    pairs with offloading.
    """
    return next((pair for pair in modules.pairs if not pair.offloads), None)


def may_fuse(modules: LayerModules, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether fused kernels may compute a call. The row counts are not known yet.

    All ranks get the same answer. If it is False, the function warns of the reason, except with fused="auto".

    modules: the modules and options of the layer.
    device: device of the rows that reach the experts.
    dtype: dtype of these rows.
    """
    if not modules.options.fused:
        return False
    why = modules.fused_refusal
    if why is None and modules.ranks.size == 1:
        _, d_model, d_hidden = stacked(modules).shapes()["w2"]
        why = fused_steps.refusal(device, dtype, d_model=d_model, d_hidden=d_hidden)
    if why is not None:
        _warn_unfused(modules, why)
    return why is None


def _warn_unfused(modules: LayerModules, why: str) -> None:
    """Warns that fused kernels do not compute a call. Warns once for each reason.

    With fused="auto" there is no warning.

    modules: the modules and options of the layer.
    why: the reason. It ends a sentence that begins with "... falls back to the unfused layer because". Two
        texts count as one reason if they are equal up to the first colon. So numbers that differ from call to
        call must come after a colon.
    """
    if modules.options.fused != "auto":
        warn_once(f"fused ({modules.options.fused!r}) falls back to the unfused layer because {why}")


class _PromisedLogits(Logits):
    """The gate's logits, x weight^T, as a tensor without values. A later kernel launch writes the values.

    The tensor has a node in the autograd graph already, so that gradients reach x and the weight.
    """

    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, weight_EM: Tensor) -> Tensor:
        ctx.save_for_backward(x_TM, weight_EM)
        return x_TM.new_empty(x_TM.shape[0], weight_EM.shape[0], dtype=torch.float32)


def defer_routing(call: Call, x_TM: Tensor) -> DeferredRouting | None:
    """Returns the routing as tensors without values yet, which the launch of the persistent kernel fills.

    The persistent kernel then computes the routing, and no other kernel is launched for it. It also computes
    the gate's product x weight^T if three conditions hold; otherwise this function does:

    - the rows and the gate's weight have the same 16-bit dtype;
    - the number of experts is even;
    - the weight's address is a multiple of 16 bytes.

    Returns None if the gate must be called before the launch, for one of three reasons:

    - the persistent kernel does not support an option of the gate;
    - the gate has hooks, which must get the routing;
    - activation checkpointing may run the call twice and compare the routing of both passes.

    The function is only for layers that exchange no row counts before the launch, because counting needs the
    values of the routing (`pmoe.decide.one_rank_counts`, `pmoe.decide.padded_counts`).

    call: the call.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    """
    modules = call.scheduled
    options = modules.options
    gate = modules.gate
    features = modules.features - {Feature.RANKS, Feature.CAPACITY, Feature.PADDED}
    is_taken = is_persistent(modules) and refused("one rank's counts", features) is None
    is_taken &= options.num_experts <= MOST_EXPERTS and options.top_k <= MOST_CHOICES
    is_taken &= not is_watched(gate)
    if not is_taken or x_TM.dtype == torch.float64 or call.replay.is_replay or call.may_run_again:
        return None
    gate = cast(TopKGate, gate)
    dtype = cast_dtype(modules, x_TM) or x_TM.dtype
    is_narrow = dtype == x_TM.dtype == gate.weight.dtype != torch.float32
    if not is_narrow or options.num_experts % 2 or memory_misfit(dense={"gate": gate.weight}) is not None:
        with torch.autocast(x_TM.device.type, enabled=False):
            return one_rank.route_tokens(gate, router_logits(x_TM, gate.weight), route.deferred_routing)
    logits_TE = _PromisedLogits.apply(x_TM, gate.weight)  # type: ignore[no-untyped-call]
    deferred = route.deferred_routing(
        logits_TE, gate.top_k, normalize=gate.normalize, z_loss_weight=gate.z_loss_weight
    )
    return deferred._replace(product=(x_TM.detach(), gate.weight.detach()))


def kernels_runner(
    modules: LayerModules,
    steps: Steps,
    chosen: RoutingInput,
    fused_routing: Callable[[], FusedRouting] | None = None,
) -> KernelsRunner:
    """Returns the runner that computes a call by fused kernels: COMET's or the persistent one.

    modules: the modules and options of the layer.
    steps: the operators that launch the kernels.
    chosen: the experts that the gate chose. The persistent kernel reads them.
    fused_routing: a function that returns the destinations of the rows. COMET's kernels read them. None for
        the persistent kernel, which computes the destinations itself.
    """
    restore = fused_pair(modules) or KEEP  # None only without a backward pass, which restores nothing
    passes: dict[str, Any] = {"steps": steps, "activation": stacked(modules).activation, "restore": restore}
    if is_persistent(modules):
        return PersistentRunner(chosen=chosen, **passes)
    assert fused_routing is not None
    shard = modules.experts.shard
    return FusedRunner(fused_routing=fused_routing(), shard=shard, **passes)


def find_steps(modules: LayerModules, inputs: Inputs, counts: RankCounts) -> Steps | None:
    """Returns the operators that launch fused kernels for a call; None if the kernels cannot compute it.

    If the result is None, the function warns of the reason, except with fused="auto". All ranks get the same
    answer. It is cached by device, dtype and sizes; if it is not in the cache yet, the function is a
    collective.

    modules: the modules and options of the layer.
    inputs: the rows and parameters of the call.
    counts: the row counts of the call.
    """
    if counts.max_rows is None:
        gate_name = type(modules.gate).__name__
        top_k = modules.options.top_k
        reason = f"the gate ({gate_name}) does not give every token top_k ({top_k}) rows"
    elif counts.needs_grad and fused_pair(modules) is None:
        reason = f"memory_reuse ({modules.options.restore}) offloads"
    else:
        device = inputs.x_TM.device
        dtype = inputs.x_TM.dtype
        request = make_request(modules, device, dtype, counts.max_tokens, counts.max_rows, counts.needs_grad)
        if modules.options.fused == "auto" and not fused_steps.is_faster(request):
            return None
        steps = fused_steps.steps_for(request)
        if not isinstance(steps, str):
            return steps
        reason = steps
    _warn_unfused(modules, reason)
    return None


def make_request(
    modules: LayerModules,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    max_rows: int,
    needs_grad: bool,
) -> fused_steps.Request:
    """Returns the properties of a call that decide whether fused kernels can compute it.

    modules: the modules and options of the layer.
    device: device of the rows that reach the experts.
    dtype: dtype of these rows.
    max_tokens: the largest number of tokens of any rank.
    max_rows: the largest number of rows that any rank receives.
    needs_grad: whether a backward pass may follow.
    """
    options = modules.options
    # A gate that decides itself which rows it keeps need not respect the capacity of the layer.
    own = {Feature.OWN_GATE, Feature.EXTERNAL_ROUTING, Feature.KEEPS_ITSELF}
    drops = options.pad_to_capacity or not own & modules.features
    return fused_steps.Request(
        ranks=modules.ranks,
        device=device,
        dtype=dtype,
        d_model=options.d_model,
        d_hidden=stacked(modules).num_hidden,
        activation=stacked(modules).activation,
        experts=modules.experts.num_local_experts,
        top_k=options.top_k * modules.experts.shard.count,  # a row goes to each shard of its expert
        max_tokens=max_tokens,
        max_rows=max_rows,
        needs_grad=needs_grad,
        slack=options.slack,
        is_persistent=is_persistent(modules),
        capacity_factor=options.capacity_factor if is_persistent(modules) and drops else None,
        sends_again=(fused_pair(modules) or KEEP).dispatched == "communicate",
    )
