"""What every rank must have given its layer alike, compared at the layer's first call.

These options decide which collectives a call issues, and on what. Ranks that differ in them would wait for
each other until the group's timeout, or take each other's bytes for something else.
"""

from __future__ import annotations

import torch

from pmoe.comm.agree import digest, gathered, same
from pmoe.layer.parts import Parts


def check_alike(parts: Parts) -> None:
    """Collective over the layer's ranks. Raises ValueError on each of them, naming option, values and ranks,
    where any two differ."""
    options = _options(parts)
    like = parts.like
    device = torch.device("cpu") if like is None else like.device
    digests = [float(digest([value])) for value in options.values()]
    agree = same(parts.ranks, device, digests, stage="comparing the layer's options")
    differ = [name for name, is_same in zip(options, agree, strict=True) if not is_same]
    if not differ:
        return
    of_ranks = gathered(parts.ranks, options[differ[0]], stage="showing the layer's options")
    values = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(of_ranks))
    also = f" (and so do {', '.join(differ[1:])})" if differ[1:] else ""
    raise ValueError(f"{differ[0]} must be the same on every rank of a MoELayer, and differs{also}: {values}")


def _options(parts: Parts) -> dict[str, str]:
    """By the names of MoELayer's arguments; objects by their types, for no address is alike."""
    spec = parts.spec
    given = {
        "d_model": spec.d_model,
        "d_hidden": spec.d_hidden,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "gate": type(parts.gate).__name__,
        "expert": type(parts.experts).__name__,
        "capacity_factor": spec.capacity_factor,
        "pad_to_capacity": spec.pad_to_capacity,
        "pipeline": spec.pipeline,
        "memory_reuse": spec.restore,
        "pipeline_backward": spec.pipeline_backward,
        "slack": spec.slack,
        "memory_budget": spec.budget,
        "fused": spec.fused,
        "dispatch": type(parts.dispatch).__name__,
        "combine": type(parts.combine).__name__,
        "send_once": spec.send_once,
        "shared_expert": None if parts.shared_expert is None else type(parts.shared_expert).__name__,
        "callbacks": f"{'without' if parts.hooks is None else 'with'} hooks inside the layer",
        "switches": spec.switches,
        "a GradientReducer": parts.gradients is not None,
    }
    return {name: str(value) for name, value in given.items()}
