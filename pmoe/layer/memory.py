"""What of a layer its memory depends on, and the bytes of a call, predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pmoe.comm.counts import Shared
from pmoe.experts.base import local_part
from pmoe.gates import GivenGate, SwitchGate, TopKGate
from pmoe.layer.fused import is_fusible
from pmoe.layer.rows import experts_parameter
from pmoe.ordering.sorted import SortedOrder
from pmoe.planner.candidates import bound
from pmoe.planner.degree import fixed_degree
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.memory import PredictedMemory, predict
from pmoe.planner.pass_rows import counted_rows
from pmoe.schedule.restore import KEEP, Restore, parse_restore
from pmoe.schedule.slots import HiddenColumns

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def predict_memory(
    layer: MoELayer,
    num_tokens: int,
    row_counts: Shared | None,
    *,
    pipeline: int | None,
    pipeline_backward: int | None,
    memory_reuse: str | Restore | None,
) -> PredictedMemory:
    """As `pmoe.MoELayer.predict_memory`."""
    check_predictable(layer, "row_counts", row_counts)
    for name, value in (("pipeline", pipeline), ("pipeline_backward", pipeline_backward)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} ({value!r}) must be None or an int of at least 1")
    if not isinstance(num_tokens, int) or num_tokens < 0:
        raise ValueError(f"num_tokens ({num_tokens!r}) must be an int of at least 0")
    if not layer.rotates and memory_reuse is None:
        raise ValueError(
            "memory_reuse (None) must be given for a layer built with memory_reuse=False: only buffers "
            "that rotate are predicted"
        )
    n = pipeline or fixed_degree(layer.pipeline)
    restore = layer.restore if memory_reuse is None else parse_restore(memory_reuse)
    if n is None or restore is True:
        raise ValueError(
            f"pipeline ({pipeline}) and memory_reuse ({memory_reuse}) must be given where the layer "
            f"chooses them (pipeline={layer.pipeline}, memory_reuse={layer.restore})"
        )
    backward = pipeline_backward or layer.pipeline_backward or n
    bins = None if row_counts is None else row_counts.send.shape[0]
    if bins is not None and (bins % n or bins % backward):
        raise ValueError(f"pipeline ({n}, {backward}) must divide the {bins} bins of row_counts")
    shape, restore = memory_shape(layer), restore or KEEP
    if row_counts is None:
        return bound(shape, num_tokens, n, backward, restore, layer.slack, layer.num_bins)
    n, backward = (each << row_counts.depth.get(each, 0) for each in (n, backward))
    rank, place = layer.ranks.rank, layer.grid.inside.rank
    rows = {each: counted_rows(shape, row_counts, rank, each, place) for each in (n, backward)}
    return predict(shape, num_tokens, rows[n], rows[backward], restore, rearranged=n != backward)


def check_predictable(layer: MoELayer, name: str, value: object) -> None:
    """Raises ValueError where not all of the memory is this layer's to know."""
    like = experts_parameter(layer)
    refused = "predict_memory must not be called" if value is None else f"{name} ({value!r}) must be left out"
    if not layer.experts.columns("cpu" if like is None else like.device.type).hidden:
        raise ValueError(
            f"{refused} where experts are modules of one's own: what they save cannot be predicted"
        )
    unknown = {
        f"kernels are fused (fused={layer.fused!r})": name != "memory_budget" and is_fusible(layer),
        f"the gate is a {type(layer.gate).__name__}": type(layer.gate)
        not in (TopKGate, SwitchGate, GivenGate),
        "gate is a module": not (layer.trusts_gate or layer._is_routed) and name == "memory_budget",
        f"the order is a {type(layer.order).__name__}": not isinstance(layer.order, SortedOrder),
        "rows do not travel by flat all-to-alls": layer.dispatch.in_steps or layer.combine.in_steps,
        "rows travel once (send_once=True)": layer.send_once,
        "there is a shared expert": layer.shared_expert is not None,
        "there are callbacks": bool(layer.callbacks),
        "rows are padded to capacity (pad_to_capacity=True)": layer.pad_to_capacity,
    }
    for why in (why for why, holds in unknown.items() if holds):
        raise ValueError(f"{refused} where {why}: its memory is not predicted")


def memory_shape(layer: MoELayer, rows_TM: Tensor | None = None) -> LayerSizes:
    """What of this layer its memory depends on. rows_TM: as the experts get them, by default of the type
    of their parameters."""
    parameter = experts_parameter(layer)
    like = parameter if rows_TM is None else rows_TM
    device_type = "cpu" if like is None else like.device.type
    size = 4 if like is None else like.element_size()
    wide = size if parameter is None else parameter.element_size()
    columns = layer.experts.columns(device_type)
    if not columns.hidden:  # modules do not say; only the cost model asks, to compare pairs
        columns = HiddenColumns(hidden=layer.d_hidden, scratch=layer.d_hidden)
    return LayerSizes(
        d_model=layer.d_model,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        num_ranks=layer.ranks.size,
        columns=columns,
        element_size=size,
        weight_size=max(4, size),
        expert_parameters=sum(local_part(each).numel() for each in layer.experts.parameters()),
        gate_parameters=sum(parameter.numel() for parameter in layer.gate.parameters()),
        bypass_local=layer.stages.local,
        inside=layer.grid.inside.size,
        has_drops=layer.capacity_factor is not None or layer._is_routed,
        gate_scores=0 if layer._is_routed else 1 + bool(getattr(layer.gate, "z_loss_weight", 0)),
        cast_from=wide if wide != size else 0,
    )
