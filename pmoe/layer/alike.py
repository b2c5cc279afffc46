"""What every rank must have given its layer alike, compared at the layer's first call.

These options decide which collectives a call issues, and on what. Ranks that differ in them would wait for
each other until the group's timeout, or take each other's bytes for something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pmoe.comm.counts import at_stage
from pmoe.kernels.registry import digest
from pmoe.layer.rows import experts_parameter
from pmoe.measure.products import agree_among

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def check_alike(layer: MoELayer) -> None:
    """Collective over the layer's ranks. Raises ValueError on each of them, naming option, values and ranks,
    where any two differ."""
    options = _options(layer)
    like = experts_parameter(layer)
    device = torch.device("cpu") if like is None else like.device
    digests = [float(digest([value])) for value in options.values()]
    most = agree_among(layer.ranks, device, stage="comparing the layer's options")(
        [*digests, *(-each for each in digests)]
    )
    differ = [
        name
        for name, high, low in zip(options, most[: len(options)], most[len(options) :], strict=True)
        if high != -low
    ]
    if not differ:
        return
    told: list[str] = [""] * layer.ranks.size
    with at_stage("telling the layer's options", layer.ranks):
        dist.all_gather_object(told, options[differ[0]], group=layer.ranks.group)
    values = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(told))
    also = f" (and so do {', '.join(differ[1:])})" if differ[1:] else ""
    raise ValueError(f"{differ[0]} must be the same on every rank of a MoELayer, and differs{also}: {values}")


def _options(layer: MoELayer) -> dict[str, str]:
    """By the names of MoELayer's arguments; objects by their types, for no address is alike."""
    given = {
        "d_model": layer.d_model,
        "d_hidden": layer.d_hidden,
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "gate": type(layer.gate).__name__,
        "expert": type(layer.experts).__name__,
        "capacity_factor": layer.capacity_factor,
        "pad_to_capacity": layer.pad_to_capacity,
        "pipeline": layer.pipeline,
        "memory_reuse": layer.restore,
        "pipeline_backward": layer.pipeline_backward,
        "slack": layer.slack,
        "memory_budget": layer.memory_budget,
        "fused": layer.fused,
        "dispatch": type(layer.dispatch).__name__,
        "combine": type(layer.combine).__name__,
        "send_once": layer.send_once,
        "shared_expert": None if layer.shared_expert is None else type(layer.shared_expert).__name__,
        "callbacks": "with hooks inside the layer" if layer.hooks else "without hooks inside the layer",
        "bypass_local": layer.bypass_local,
        "sequential": layer.sequential,
        "one_lane": layer.one_lane,
        "a GradientReducer": layer.gradients is not None,
    }
    return {name: str(value) for name, value in given.items()}
