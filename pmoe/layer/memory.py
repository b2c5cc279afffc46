"""What of a layer its memory depends on, and the bytes of a call, predicted."""

from __future__ import annotations

from torch import Tensor

from pmoe.comm.counts import RankCounts
from pmoe.experts.base import local_part
from pmoe.layer.parts import Parts
from pmoe.planner.candidates import bound
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.memory import PredictedMemory, predict
from pmoe.planner.pass_rows import counted_rows
from pmoe.schedule.restore import KEEP, Restore, parse_restore
from pmoe.schedule.slots import HiddenColumns


def predict_memory(
    parts: Parts,
    num_tokens: int,
    row_counts: RankCounts | None,
    *,
    pipeline: int | None,
    pipeline_backward: int | None,
    memory_reuse: str | Restore | None,
) -> PredictedMemory:
    """As `pmoe.MoELayer.predict_memory`."""
    spec = parts.spec
    check_predictable(parts, "row_counts", row_counts)
    for name, value in (("pipeline", pipeline), ("pipeline_backward", pipeline_backward)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} ({value!r}) must be None or an int of at least 1")
    if not isinstance(num_tokens, int) or num_tokens < 0:
        raise ValueError(f"num_tokens ({num_tokens!r}) must be an int of at least 0")
    if not spec.rotates and memory_reuse is None:
        raise ValueError(
            "memory_reuse (None) must be given for a layer built with memory_reuse=False: only buffers "
            "that rotate are predicted"
        )
    n = pipeline or spec.fixed_degree
    restore = spec.restore if memory_reuse is None else parse_restore(memory_reuse)
    if n is None or restore is True:
        raise ValueError(
            f"pipeline ({pipeline}) and memory_reuse ({memory_reuse}) must be given where the layer "
            f"chooses them (pipeline={spec.pipeline}, memory_reuse={spec.restore})"
        )
    backward = pipeline_backward or spec.pipeline_backward or n
    bins = None if row_counts is None else row_counts.send.shape[0]
    if bins is not None and (bins % n or bins % backward):
        raise ValueError(f"pipeline ({n}, {backward}) must divide the {bins} bins of row_counts")
    shape, restore = memory_shape(parts), restore or KEEP
    if row_counts is None:
        return bound(shape, num_tokens, n, backward, restore, spec.slack, parts.num_bins)
    n, backward = (each << row_counts.depth.get(each, 0) for each in (n, backward))
    rank, place = parts.ranks.rank, parts.grid.inside.rank
    rows = {each: counted_rows(shape, row_counts, rank, each, place) for each in (n, backward)}
    return predict(shape, num_tokens, rows[n], rows[backward], restore, rearranged=n != backward)


def check_predictable(parts: Parts, name: str, value: object) -> None:
    """Raises ValueError where not all of the memory is this layer's to know."""
    refused = "predict_memory must not be called" if value is None else f"{name} ({value!r}) must be left out"
    taker = "memory budget" if name == "memory_budget" else "memory"
    why = parts.refusal(taker)
    if why is None and name != "memory_budget" and parts.spec.fused:
        from pmoe.layer.fused import is_fusible

        why = f"kernels are fused (fused={parts.spec.fused!r})" if is_fusible(parts) else None
    like = parts.like
    if why is None and not parts.experts.columns("cpu" if like is None else like.device.type).hidden:
        why = f"experts ({type(parts.experts).__name__}) do not say what they save"
    if why is not None:
        raise ValueError(f"{refused} where {why}: its memory is not predicted")


def memory_shape(parts: Parts, rows_TM: Tensor | None = None) -> LayerSizes:
    """What of this layer its memory depends on. rows_TM: as the experts get them, by default of the type
    of their parameters."""
    spec, parameter = parts.spec, parts.like
    like = parameter if rows_TM is None else rows_TM
    device_type = "cpu" if like is None else like.device.type
    size = 4 if like is None else like.element_size()
    wide = size if parameter is None else parameter.element_size()
    columns = parts.experts.columns(device_type)
    if not columns.hidden:  # modules do not say; only the cost model asks, to compare pairs
        columns = HiddenColumns(hidden=spec.d_hidden, scratch=spec.d_hidden)
    return LayerSizes(
        d_model=spec.d_model,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_ranks=parts.ranks.size,
        columns=columns,
        element_size=size,
        weight_size=max(4, size),
        expert_parameters=sum(local_part(each).numel() for each in parts.experts.parameters()),
        gate_parameters=sum(parameter.numel() for parameter in parts.gate.parameters()),
        bypass_local=parts.stages.local,
        inside=parts.grid.inside.size,
        has_drops=spec.capacity_factor is not None or parts.has_external_routing,
        gate_scores=0 if parts.has_external_routing else 1 + bool(getattr(parts.gate, "z_loss_weight", 0)),
        cast_from=wide if wide != size else 0,
    )
