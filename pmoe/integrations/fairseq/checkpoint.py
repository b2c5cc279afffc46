"""One file holds the experts of all ranks, parameters and optimiser state, as one process that has them all
would save it: any number of ranks loads it, and so do generate and eval-lm.

Experts are the first dimension of each of their parameters, and of whatever an optimiser keeps of the
parameter's length there. Rank r of the W that hold them together has rows [r * E / W, (r + 1) * E / W). Where
there are more ranks, each W consecutive ones hold a copy of all experts, and the first W give theirs to the
file.

Letters: W ranks, E experts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe import MoELayer
from pmoe.comm.ranks import Ranks


def gather_model(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """``state`` with all ranks' experts in it, on the host, on rank 0; None for them elsewhere. Every rank
    must call it."""
    layers = _expert_names(model)
    return {**state, **{name: _gathered(state[name], layer.ranks) for name, layer in layers.items()}}


def own_experts(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with this rank's experts only, of one with all experts."""
    own = dict(state)
    for name, layer in _expert_names(model).items():
        if name not in own:
            continue  # load_state_dict says so
        if own[name].shape[0] != layer.num_experts:
            raise ValueError(
                f"{name} of the checkpoint (experts: {own[name].shape[0]}) must hold --moe-num-experts "
                f"({layer.num_experts})"
            )
        own[name] = own[name].narrow(0, layer.first_expert, layer.num_local_experts)
    return own


def gather_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """An optimiser's ``state_dict()`` with all experts in it, which ``ranks`` hold together, on rank 0. Every
    rank must call it."""
    return _changed(optimizer, state, 1, lambda kept, _: _gathered(kept, ranks))


def own_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The part of a gathered ``state`` that this rank's optimiser has."""
    own = ranks.rank
    return _changed(optimizer, state, ranks.size, lambda kept, size: kept.narrow(0, own * size, size))


def for_inference(config: Any) -> Any:
    """A model's configuration as its checkpoint holds it: a process that builds the model from it holds all
    experts, so several can generate or evaluate without waiting for each other."""
    if isinstance(config, Namespace):
        return Namespace(**{**vars(config), "moe_expert_parallel": "false"})
    return {**config, "moe_expert_parallel": "false"}


def _expert_names(model: nn.Module) -> dict[str, MoELayer]:
    """Of the state dict, experts' parameters with their layers, in an order that all ranks share."""
    return {
        f"{prefix}.experts.{name}": layer
        for prefix, layer in model.named_modules()
        if isinstance(layer, MoELayer)
        for name, _ in layer.experts.named_parameters()
    }


def _changed(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    num_parts: int,
    change: Callable[[Tensor, int], Tensor | None],
) -> dict[str, Any]:
    """``state`` with another tensor for each that is kept of an expert's parameter by expert. num_parts: how
    many ranks' experts it holds. change: of a tensor and the number of this rank's experts."""
    changed = {**state, "state": dict(state["state"])}
    for here, there in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(here["params"], there["params"], strict=True):
            if hasattr(parameter, "expert") and index in state["state"]:
                size = parameter.shape[0]
                changed["state"][index] = {
                    key: change(value, size)
                    if isinstance(value, Tensor) and value.shape[:1] == (num_parts * size,)
                    else value
                    for key, value in state["state"][index].items()
                }
    return changed


def _gathered(own: Tensor, ranks: Ranks) -> Tensor | None:
    """The rows of ``ranks`` on rank 0's host, None elsewhere. One tensor at a time is whole on the device."""
    own = own.detach().contiguous()
    if dist.get_rank() != ranks.rank:
        return None  # a copy
    if ranks.size == 1:
        return own.cpu()
    parts = [torch.empty_like(own) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(own, parts, dst=0, group=ranks.group)
    return None if parts is None else torch.cat([part.cpu() for part in parts])
