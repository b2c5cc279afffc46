"""All that statistics read of a layer after a call, and where they do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pmoe.comm.counts import RankCounts
from pmoe.engine.run import Journal
from pmoe.layer import MoELayer
from pmoe.layer.memory import check_predictable
from pmoe.layer.ran import Ran
from pmoe.planner.exposed import Overlap, overlap
from pmoe.planner.memory import PredictedMemory


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """What a layer held after its last call.

    counts: rows that came, None before the first call. hidden: columns of T_M, 0 where experts are modules.
    device: of its parameters.
    """

    ran: Ran | None
    counts: RankCounts | None
    rows_E: tuple[int, ...]
    d_model: int
    hidden: int
    num_local_experts: int
    device: torch.device | None
    predicted: PredictedMemory | None
    unpredicted: str
    forward: Overlap | None
    backward: Overlap | None


def read_layer(layer: MoELayer, journal: Journal | None) -> LayerReading:
    """Asks the layer. On CUDA it waits for row counts that are still on the device."""
    ran = layer.ran
    spans = [None if journal is None else journal.last(layer.experts, way) for way in ("forward", "backward")]
    forward, backward = (None if each is None else overlap(each) for each in spans)
    predicted, why = (None, "") if ran is None else _predicted(layer, ran)
    return LayerReading(
        ran=ran,
        counts=layer.row_counts,
        rows_E=tuple(layer.tokens_per_expert.tolist()),
        d_model=layer.d_model,
        hidden=0 if ran is None else layer.experts.columns(ran.device.type).hidden,
        num_local_experts=layer.num_local_experts,
        device=next((parameter.device for parameter in layer.parameters()), None),
        predicted=predicted,
        unpredicted=why,
        forward=forward,
        backward=backward,
    )


def _predicted(layer: MoELayer, ran: Ran) -> tuple[PredictedMemory | None, str]:
    """The bytes, or None and why not."""
    if ran.path != "pipeline":
        return None, f"memory of the path {ran.path!r} is not predicted"
    if ran.backward is None:
        return None, "the last forward pass was without a backward pass"
    if ran.restore is None:
        return None, "only buffers that rotate are predicted, and memory_reuse is False"
    counts = layer.row_counts
    assert counts is not None
    try:
        check_predictable(layer.parts, "row_counts", None)  # its message is without the counts
        found = layer.predict_memory(
            ran.num_tokens,
            replace(counts, depth={}),  # the chunks are those that were cut
            pipeline=ran.forward,
            pipeline_backward=ran.backward,
            memory_reuse=ran.restore,
        )
    except ValueError as error:
        return None, str(error)
    return found, ""
