"""Checkpoints: one file with the experts of all ranks, their parameters and their optimiser state.

The file is the one that a single process with all experts would save. So any number of ranks can load it, and
generate and eval-lm can too.

Experts are dimension 0 of each of their parameters, and of every tensor of the same length that an optimiser
keeps for a parameter. W ranks hold all experts together: rank r holds rows [r * E / W, (r + 1) * E / W). If
there are more ranks, each W consecutive ones hold a copy of all experts, and the first W write the file.

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
    """Returns a model's ``state`` with the experts of all ranks in place of this rank's.

    On rank 0 they are on the host; on other ranks they are None. Collective: every rank must call it.
    """
    layers = _expert_names(model)
    return {**state, **{name: _gathered(state[name], layer.ranks) for name, layer in layers.items()}}


def own_experts(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state``, which has all experts, with only this rank's experts.

    Raises ValueError if ``state`` has another number of experts than the model.
    """
    own_state = dict(state)
    for name, layer in _expert_names(model).items():
        if name not in own_state:
            continue  # load_state_dict raises, with the names of all missing tensors
        if own_state[name].shape[0] != layer.num_experts:
            raise ValueError(
                f"{name} of the checkpoint (experts: {own_state[name].shape[0]}) must hold --moe-num-experts "
                f"({layer.num_experts})"
            )
        own_state[name] = own_state[name].narrow(0, layer.first_expert, layer.num_local_experts)
    return own_state


def gather_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Returns an optimiser's state dict with the experts of all ranks in place of this rank's, on rank 0.

    state: the optimiser's ``state_dict()``.
    ranks: those that hold all experts together.

    On other ranks the tensors are None. Collective: every rank must call it.
    """
    return _changed(optimizer, state, 1, lambda kept, _: _gathered(kept, ranks))


def own_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Returns a state dict of `gather_optimizer` with only this rank's experts."""
    rank = ranks.rank
    return _changed(optimizer, state, ranks.size, lambda kept, size: kept.narrow(0, rank * size, size))


def for_inference(config: Any) -> Any:
    """Returns a model's configuration for its checkpoint: one in which every process holds all experts.

    Several processes that build the model from it can then generate or evaluate without waiting for each
    other.
    """
    if isinstance(config, Namespace):
        return Namespace(**{**vars(config), "moe_expert_parallel": "false"})
    return {**config, "moe_expert_parallel": "false"}


def _expert_names(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the layer of each parameter of experts, by the parameter's name in the state dict.

    The order is the same on all ranks, which gather one parameter after the other.
    """
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
    """Returns an optimiser's ``state`` in which tensors that belong to experts are replaced.

    num_parts: number of ranks whose experts ``state`` holds: 1, or W.
    change: function from a tensor and the number of this rank's experts to the new tensor.

    Replaced are tensors of parameters marked ``expert`` that have one row for each expert.
    """
    changed = {**state, "state": dict(state["state"])}
    for own_group, stored_group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(own_group["params"], stored_group["params"], strict=True):
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
    """Returns the rows of all ``ranks`` on rank 0's host; None on other ranks.

    Called for one tensor after the other, so that only one is whole on the device at a time.
    """
    own = own.detach().contiguous()
    if dist.get_rank() != ranks.rank:
        return None  # this rank is among those that hold a copy, which is not written
    if ranks.size == 1:
        return own.cpu()
    parts = [torch.empty_like(own) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(own, parts, dst=0, group=ranks.group)
    return None if parts is None else torch.cat([part.cpu() for part in parts])
