"""The sizes of a layer and of its calls, from which bytes and seconds are predicted."""

from __future__ import annotations

import math

from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.comm.hierarchical import HierarchicalExchange
from pmoe.engine.variants.padding import PaddedRowCounts
from pmoe.experts.base import Experts
from pmoe.experts.operands import local_part
from pmoe.gates.base import Gate
from pmoe.gates.capacity import expert_capacity
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.runners.features import Feature
from pmoe.schedule.buffer_sizes import HiddenColumns


def splits_of(parts: LayerModules, num_tokens: int, top_k: int) -> PaddedRowCounts:
    """Returns how the rows of a rank with ``num_tokens`` tokens are padded.

    top_k: the number of choices of each token.
    """
    spec = parts.spec
    assert spec.capacity_factor is not None
    capacity = expert_capacity(spec.capacity_factor, num_tokens, top_k, spec.num_experts)
    return PaddedRowCounts(
        num_experts=spec.num_experts,
        capacity=min(capacity, num_tokens),  # a token's experts are distinct: no expert gets more rows
        bins=math.lcm(*spec.degrees),
    )


def rows_of_call(parts: LayerModules, num_tokens: int) -> CallRows:
    """Returns how many rows a call with ``num_tokens`` tokens has on this rank, for any routing."""
    spec = parts.spec
    top_k = parts.spec.top_k
    slots = num_tokens * top_k
    if spec.pad_to_capacity:
        rows = splits_of(parts, num_tokens, top_k).num_rows
        return CallRows(tokens=num_tokens, inner=rows, slots=rows, choices=1, spread="padded")
    if not getattr(parts.router, "picks_tokens", False):
        return CallRows(tokens=num_tokens, inner=num_tokens, slots=slots, choices=top_k)
    rows = parts.router.num_rows(num_tokens) if isinstance(parts.router, Gate) else slots
    if getattr(parts.router, "mixes_tokens", False):
        return CallRows(tokens=num_tokens, inner=rows, slots=rows, choices=1, spread="mixed")
    return CallRows(tokens=num_tokens, inner=num_tokens, slots=rows, choices=spec.num_experts)


def memory_shape(parts: LayerModules, rows_TM: Tensor | None = None) -> LayerSizes:
    """Returns the sizes of a layer from which its memory and times are predicted.

    rows_TM: (T, M), rows whose dtype and device count; None counts those of the parameters.
    """
    spec = parts.spec
    parameter = parts.like
    shared_expert = parts.shared_expert
    like = parameter if rows_TM is None else rows_TM
    device_type = "cpu" if like is None else like.device.type
    row_size = 4 if like is None else like.element_size()
    parameter_size = row_size if parameter is None else parameter.element_size()
    columns = parts.experts.columns(device_type)
    if not columns.hidden:  # modules do not say how wide their hidden is
        columns = HiddenColumns(hidden=spec.d_hidden, scratch=spec.d_hidden)
    return LayerSizes(
        d_model=spec.d_model,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_ranks=parts.ranks.size,
        columns=columns,
        element_size=row_size,
        weight_size=max(4, row_size),
        expert_parameters=_elements_of(parts.experts),
        gate_parameters=sum(parameter.numel() for parameter in parts.gate.parameters()),
        bypass_local=parts.stages.local,
        inside=parts.grid.inside.size,
        has_drops=Feature.EXTERNAL_ROUTING in parts.features
        or (spec.capacity_factor is not None and not spec.pad_to_capacity),
        gate_scores=getattr(parts.router, "saved_scores", 1)
        + bool(getattr(parts.router, "z_loss_weight", 0)),
        cast_from=parameter_size if parameter_size != row_size else 0,
        rotates=spec.rotates,
        merges=spec.send_once,
        shared_columns=HiddenColumns() if shared_expert is None else shared_expert.columns(device_type),
        shared_parameters=0 if shared_expert is None else _elements_of(shared_expert),
        relays=parts.dispatch.topology.max_local if isinstance(parts.dispatch, HierarchicalExchange) else 0,
    )


def _elements_of(experts: Experts) -> int:
    """Returns the number of parameter elements that this rank holds of experts."""
    return sum(local_part(parameter).numel() for parameter in experts.parameters())
