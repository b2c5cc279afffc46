"""fairseq checkpoints of models with experts: one file holds the experts of all ranks.

A single process with all experts would save the same file: it has the parameters and the optimiser state of
all experts. So any number of ranks can load it, and fairseq's generate and eval-lm can, too.

Every parameter of experts has one entry for each expert along dimension 0. A tensor that an optimiser stores
for the parameter has these entries, too, if its dimension 0 has the same length.

W ranks together hold all E experts: rank r holds entries r * E / W to (r + 1) * E / W - 1. If there are more
than W ranks, each group of W consecutive ranks holds a copy of all experts. The first W ranks then write the
file.
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
    """Returns a model's state dict with the experts of all ranks, for a checkpoint.

    state: the model's ``state_dict()``, with this rank's experts.

    On rank 0 the experts' tensors are on the host; on other ranks they are None. Collective: every rank must
    call it.
    """
    layers = _expert_names(model)
    return {**state, **{name: _gathered(state[name], layer.ranks) for name, layer in layers.items()}}


def own_experts(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with only this rank's experts, made from one with all experts.

    model: the model that will load the result.
    state: the state dict of a checkpoint, with all experts.

    Raises ValueError if the number of experts in ``state`` is not the model's.
    """
    own_state = dict(state)
    for name, layer in _expert_names(model).items():
        if name not in own_state:
            continue  # load_state_dict will raise an error that names all missing tensors
        if own_state[name].shape[0] != layer.num_experts:
            raise ValueError(
                f"{name} of the checkpoint (experts: {own_state[name].shape[0]}) must hold --moe-num-experts "
                f"({layer.num_experts})"
            )
        own_state[name] = own_state[name].narrow(0, layer.first_expert, layer.num_local_experts)
    return own_state


def gather_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Returns an optimiser's state dict with the experts of all ranks, for a checkpoint.

    state: the optimiser's ``state_dict()``, with this rank's experts.
    ranks: the ranks that together hold all experts.

    On ranks other than 0 the experts' tensors are None. Collective: every rank must call it.
    """
    return _changed(optimizer, state, 1, lambda value, _: _gathered(value, ranks))


def own_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Returns an optimiser's state dict with only this rank's experts, made from one with all experts.

    state: a state dict that `gather_optimizer` returned.
    ranks: the ranks that together hold all experts.
    """
    rank = ranks.rank
    return _changed(optimizer, state, ranks.size, lambda value, size: value.narrow(0, rank * size, size))


def for_inference(config: Any) -> Any:
    """Returns a model's configuration for a checkpoint, changed so that every process holds all experts.

    The processes of generate or eval-lm, which build the model from this configuration, do not communicate.
    If experts were spread over these processes, a process would wait for others that have no more batches.

    config: the configuration of the model.
    """
    if isinstance(config, Namespace):
        return Namespace(**{**vars(config), "moe_expert_parallel": "false"})
    return {**config, "moe_expert_parallel": "false"}


def _expert_names(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layer of every parameter of experts, by the parameter's name in the state dict.

    The order is the same on all ranks, which gather the parameters one by one in this order.
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
    """Returns an optimiser's state dict in which the tensors of experts are replaced.

    A tensor is replaced if it belongs to a parameter with the attribute ``expert`` and has one entry for each
    expert along dimension 0.

    optimizer: the optimiser.
    state: its state dict.
    num_parts: number of ranks whose experts ``state`` holds: 1, or all ranks that share the experts.
    change: function from a tensor and this rank's number of experts to the new tensor.
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
    """Returns a tensor of experts concatenated over all ranks, on rank 0's host; None on other ranks.

    The caller gathers one tensor after the other, so that no more than one whole tensor is on the device at a
    time.

    own: the tensor with this rank's experts along dimension 0, any shape.
    ranks: the ranks that together hold all experts.
    """
    own = own.detach().contiguous()
    if dist.get_rank() != ranks.rank:
        return None  # this rank holds a copy of experts that other ranks write
    if ranks.size == 1:
        return own.cpu()
    parts = [torch.empty_like(own) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(own, parts, dst=0, group=ranks.group)
    return None if parts is None else torch.cat([part.cpu() for part in parts])
