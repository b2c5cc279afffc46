"""The sizes of a layer and of its calls, from which bytes and seconds are predicted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.comm.hierarchical import HierarchicalExchange
from pmoe.comm.topology import ACROSS, INSIDE
from pmoe.engine.variants.padding import PaddedRowCounts
from pmoe.experts.launched import kernels_for
from pmoe.experts.operands import local_part
from pmoe.experts.stacked import StackedExperts
from pmoe.gates.base import Gate
from pmoe.gates.capacity import expert_capacity
from pmoe.kernels.operands import is_dense
from pmoe.ordering.sorted import copies_bytes
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import CallRows, CopyNumbers, LayerSizes
from pmoe.runners.features import Feature
from pmoe.schedule.buffer_sizes import HiddenColumns
from pmoe.schedule.wire import AS_THEY_ARE


def splits_of(modules: LayerModules, num_tokens: int, top_k: int, degrees: Sequence[int]) -> PaddedRowCounts:
    """Returns the row counts of a rank with ``num_tokens`` tokens under pad_to_capacity=True.

    The rank sends every expert exactly ``capacity`` rows: those of its tokens, then rows of zeros.

    modules: the modules and options of the layer.
    num_tokens: number of tokens of the rank.
    top_k: the number of choices of each token.
    degrees: the numbers of chunks that may be chosen for the call.
    """
    options = modules.options
    assert options.capacity_factor is not None
    capacity = expert_capacity(options.capacity_factor, num_tokens, top_k, options.num_experts)
    return PaddedRowCounts(
        num_experts=options.num_experts,
        capacity=min(capacity, num_tokens),  # a token's experts are distinct: no expert gets more rows
        bins=math.lcm(*degrees),
    )


def rows_of_call(modules: LayerModules, num_tokens: int, degrees: Sequence[int]) -> CallRows:
    """Returns the numbers of input rows and of (row, expert) pairs of a call on this rank, before dispatch.

    These numbers are fixed by the layer's options and ``num_tokens``. The routing does not change them; it
    only decides to which experts the rows go.

    modules: the modules and options of the layer.
    num_tokens: number of tokens of the rank.
    degrees: the numbers of chunks that may be chosen for the call.
    """
    options = modules.options
    top_k = modules.options.top_k
    slots = num_tokens * top_k
    if options.pad_to_capacity:
        rows = splits_of(modules, num_tokens, top_k, degrees).num_rows
        return CallRows(tokens=num_tokens, inner=rows, slots=rows, choices=1, spread="padded")
    if not getattr(modules.router, "picks_tokens", False):
        return CallRows(tokens=num_tokens, inner=num_tokens, slots=slots, choices=top_k)
    rows = modules.router.num_rows(num_tokens) if isinstance(modules.router, Gate) else slots
    if getattr(modules.router, "mixes_tokens", False):
        return CallRows(tokens=num_tokens, inner=rows, slots=rows, choices=1, spread="mixed")
    return CallRows(tokens=num_tokens, inner=num_tokens, slots=rows, choices=options.num_experts)


def counted_degrees(modules: LayerModules, choice: Choice) -> tuple[int, ...]:
    """Returns the numbers of chunks for which a call with this choice counts its rows.

    With ``pipeline="solve"`` these are the numbers of the choice, because the options allow too many to count
    rows for all. Otherwise they are all numbers that the options allow.

    modules: the modules and options of the layer.
    choice: the numbers of chunks of both passes, and a restore pair.
    """
    return choice.degrees if modules.options.solves else modules.options.degrees


def _runs_programs(modules: LayerModules, device_type: str, row_size: int) -> bool:
    """Returns whether compiled programs (``Switches(program=True)``) will probably run the layer's calls.

    The numbers of chunks and the row counts of a call are not known yet, so the engine may still run some
    calls. Programs take only rows in bfloat16 or float16, on CUDA.

    modules: the modules and options of the layer.
    device_type: the type of the rows' device.
    row_size: bytes of an element of a row.
    """
    options = modules.options
    if not (options.switches.program and options.rotates and device_type == "cuda"):
        return False
    return row_size == 2 and modules.refusal("program") is None


def places_results(modules: LayerModules, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether kernels store the results of sorted rows in the order in which the rows arrived.

    If they do, no memory is needed for results in sorted order.

    The result is False if kernels cannot read a weight as it is, such as a part of a flat buffer that does
    not begin at a multiple of 16 bytes. The result may be False although kernels store results in this way:
    a call may cast or gather such weights into new memory, which kernels can read.

    modules: the modules and options of the layer.
    device, dtype: device and dtype of the rows that reach the experts.
    """
    is_plain = modules.wires is None and modules.products is None and not modules.options.send_once
    may_copy = copies_at_most(modules) != CopyNumbers()
    if not is_plain or may_copy or kernels_for(modules.experts, device, dtype) is None:
        return False
    return all(map(is_dense, map(local_part, modules.experts.used_parameters())))


def memory_shape(modules: LayerModules, rows_TM: Tensor | None = None) -> LayerSizes:
    """Returns the sizes of a layer that predictions of its memory and times need.

    modules: the modules and options of the layer.
    rows_TM: (T, ...), rows of T tokens or their projections. Only dtype and device are read from them; if it
        is None, dtype and device are those of the parameters.
    """
    options = modules.options
    parameter = modules.reference_parameter
    shared_expert = modules.shared_expert
    dispatch = modules.dispatch
    like = parameter if rows_TM is None else rows_TM
    device_type = "cpu" if like is None else like.device.type
    row_size = 4 if like is None else like.element_size()
    parameter_size = row_size if parameter is None else parameter.element_size()
    columns = modules.experts.columns(device_type)
    # FSDP2 gathers the parameters of all adapters of the experts, also of those that a call does not use.
    is_sharded = modules.experts.is_sharded
    held_parameters = list(modules.experts.parameters() if is_sharded else modules.experts.used_parameters())
    if not columns.hidden:  # experts that are modules do not say how wide their hidden activation is
        columns = HiddenColumns(hidden=options.d_hidden, scratch=options.d_hidden)
    return LayerSizes(
        d_model=options.row_columns,
        outer=0 if options.d_latent is None else options.d_model,
        num_experts=options.num_experts,
        top_k=options.top_k,
        num_ranks=modules.ranks.size,
        columns=columns,
        element_size=row_size,
        weight_size=max(4, row_size),
        expert_parameters=_elements_of(held_parameters, modules.experts.is_sharded),
        frozen_parameters=_elements_of(
            (parameter for parameter in held_parameters if not parameter.requires_grad),
            modules.experts.is_sharded,
        ),
        shared_over=modules.experts.shared_over,
        keeps_gathered=modules.experts.keeps_gathered,
        scaled_parameters=modules.experts.num_scaled,
        gate_parameters=sum(
            parameter.numel() for parameter in modules.gate.parameters() if parameter.requires_grad
        ),
        bypass_local=modules.stages.local,
        esp_size=modules.grid.esp.size,
        has_drops=Feature.EXTERNAL_ROUTING in modules.features
        or (options.capacity_factor is not None and not options.pad_to_capacity),
        gate_scores=getattr(modules.router, "saved_scores", 1)
        + bool(getattr(modules.router, "z_loss_weight", 0)),
        cast_from=parameter_size if parameter_size != row_size else 0,
        rotates=options.rotates,
        programs=_runs_programs(modules, device_type, row_size),
        places=like is not None and places_results(modules, like.device, like.dtype),
        merges=options.send_once,
        wires=modules.wires or AS_THEY_ARE,
        packs_tokens=device_type == "cpu" and copies_bytes(modules.order),
        device_type=device_type,
        products=modules.products,
        shared_columns=HiddenColumns() if shared_expert is None else shared_expert.columns(device_type),
        has_shared_gate=modules.shared_gate is not None,
        shared_parameters=0 if shared_expert is None else _elements_of(shared_expert.parameters()),
        copies=copies_at_most(modules),
        relays=dispatch.topology.max_local if isinstance(dispatch, HierarchicalExchange) else 0,
    )


def agreed_sizes(modules: LayerModules, rows_TM: Tensor, *, sorts_results: bool = True) -> LayerSizes:
    """Returns sizes of a layer that are the same on all ranks, so that all ranks make the same choices.

    A user may freeze parameters on some ranks only, also between two calls. So ``requires_grad`` does not
    decide which parameters count as trained:

    - all parameters of the gate count as trained;
    - if experts have an adapter, only the adapter counts, otherwise all parameters of the experts.

    modules: the modules and options of the layer.
    rows_TM: (T, M), rows of T tokens with M = d_model columns.
    sorts_results: whether any rank needs memory for results sorted by expert (`RankCounts.sorts_results`). A
        rank needs none if its kernels store results in the order in which the rows arrived. Some ranks may
        lack these kernels, so the ranks have agreed on the answer. True gives the larger memory.
    """
    sizes = memory_shape(modules, rows_TM)
    beside_adapter = 0
    if isinstance(modules.experts, StackedExperts) and sizes.columns.adapter:
        beside_adapter = _elements_of(parameter for _, parameter in modules.experts.own_parameters())
    gate_parameters = _elements_of(modules.gate.parameters())
    return replace(
        sizes,
        frozen_parameters=beside_adapter,
        gate_parameters=gate_parameters,
        places=not sorts_results,
    )


def copies_at_most(modules: LayerModules, per_rank: int | None = None) -> CopyNumbers:
    """Returns upper bounds of the copies of busy experts in a call; zeros without ``balance``.

    modules: the modules and options of the layer.
    per_rank: the largest number of copies that a rank hosts; None for the number that the options allow.
    """
    num_ranks = modules.grid.ep.size
    if not modules.options.balance:
        return CopyNumbers()
    if per_rank is None:
        per_rank = modules.options.most_copies(num_ranks)
    # With a budget no copies stay for later calls. Copies of experts that are modules stay until backward.
    may_stay = modules.options.budget is None or modules.experts.are_modules
    return CopyNumbers.at_most(per_rank, modules.experts.num_local_experts, num_ranks, stay=may_stay)


def _elements_of(parameters: Iterable[Tensor], is_sharded: bool = False) -> int:
    """Returns the number of elements of the parameters with which this rank computes.

    parameters: the parameters, of any shape.
    is_sharded: whether FSDP2 shards the parameters over the ranks that hold copies of them. They are gathered
        before use, so the number is that of a whole copy.
    """
    if is_sharded:
        return sum(map(_gathered_elements, parameters))
    return sum(local_part(parameter).numel() for parameter in parameters)


def _gathered_elements(parameter: Any) -> int:
    """Returns how many elements of a parameter belong to this rank's experts.

    FSDP2 may have split these elements over the ranks that hold copies of the experts. Before a call it
    gathers all these elements, so all of them count, whether they are gathered now or not.

    parameter: a DTensor of any shape, on a mesh with named dimensions. It may also be a plain tensor: if an
        expert is a module, FSDP2 replaces its parameters by plain tensors while they are gathered.
    """
    if not hasattr(parameter, "device_mesh"):
        return int(parameter.numel())
    mesh = parameter.device_mesh
    elements: int = parameter.numel()
    for name, placement in zip(mesh.mesh_dim_names, parameter.placements, strict=True):
        if name in (ACROSS, INSIDE) and not placement.is_replicate():
            elements //= mesh.size(mesh.mesh_dim_names.index(name))
    return elements
