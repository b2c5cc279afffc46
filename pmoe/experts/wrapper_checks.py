"""Refuses data-parallel wrappers that treat the ranks' experts as copies of each other.

Each rank holds different experts. A data-parallel wrapper that manages them broadcasts one rank's experts to
all, or treats the ranks' experts as shards of one tensor. The model would still train, and the result would
be wrong. So this is an error, and it shows the line to add.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pmoe.experts.base import Experts, is_expert, local_part
from pmoe.experts.values import has_values

DDP, FSDP2, FSDP1 = "DistributedDataParallel", "fully_shard", "FullyShardedDataParallel"
OWN = "pmoe.expert_parameters(model)"
RIGHT = {
    DDP: f"{DDP}(pmoe.parallelize(model, mesh)), after every module inside it is wrapped",
    FSDP2: f"pmoe.parallelize(model, mesh), then {FSDP2}(..., ignored_params={OWN})",
    FSDP1: f"pmoe.parallelize(model, mesh), then {FSDP1}(model, ignored_states={OWN})",
}
"""How a model must be wrapped instead, by the name of the wrapper."""

COPIED = (
    "experts must differ from rank to rank, but all ranks have those of one: they were copied by "
    f"dist.broadcast, an optimizer or a wrapper. Exclude {OWN} from it, or build the model again and wrap it "
    f"by {RIGHT[DDP]}"
)
"""The error for experts that are the same on all ranks although they were built to differ."""


def check_wrapped(experts: Experts, own: set[int]) -> None:
    """Raises ValueError on every rank if a wrapper over several of the layer's ranks has experts.

    own: the global numbers of the layer's ranks.

    A wrapper may span ranks that hold the same experts, one in each of several groups with such a layer. But
    it must not have experts of a parallelized model, whose gradients are averaged already.
    """
    parameter = next(experts.parameters(), None)
    ddp = DistributedDataParallel._get_active_ddp_module()
    if parameter is not None and is_expert(parameter) and ddp is None:
        return  # FSDP puts new parameters in their place, which have no mark
    for wrapper, ranks in _wrappers(experts):
        mixes = len(ranks & own) > 1 if ranks else len(own) == dist.get_world_size()
        if mixes or experts.is_parallelized:
            raise ValueError(
                f"experts' parameters must not be in {wrapper}, which treats them as the same on every rank. "
                f"Build the model again and wrap it by {RIGHT[wrapper]}"
            )


def _wrappers(experts: Experts) -> Iterator[tuple[str, set[int]]]:
    """Yields each wrapper that manages parameters of these experts, and its ranks as global numbers.

    The ranks of the older FSDP are unknown: they are given as an empty set, and there are several.
    """
    parameters = {id(each) for each in experts.parameters()}
    modules = set(experts.modules())
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp and any(id(each) in parameters for each in ddp._module_parameters if each.requires_grad):
        yield DDP, set(dist.get_process_group_ranks(ddp.process_group))
    # fully_shard imports this module. If nothing did, there is no wrapper, and importing it costs time.
    states = sys.modules.get("torch.distributed._composable_state")
    for state in [] if states is None else list(states._module_state_mapping.values()):
        for group in getattr(state(), "_fsdp_param_groups", ()):
            if any(each._module_info.module in modules for each in group.fsdp_params):
                yield FSDP2, set(group.mesh_info.mesh.mesh.flatten().tolist())
    bases = (getattr(each, "_base", None) for module in modules for each in vars(module).values())
    # The older FSDP turns parameters into views of one flat tensor, which has this mark, sharded or whole.
    if any(hasattr(base, "_fsdp_flattened") for base in bases):
        yield FSDP1, set()


@torch.no_grad()
def sampled(experts: Experts) -> str:
    """Returns a digest of the first 8 values of each parameter, as bfloat16; "" on the meta device."""
    local_tensors = [local_part(tensor) for tensor in experts.parameters()]
    if not all(map(has_values, local_tensors)):
        return ""
    values = [tensor.reshape(-1)[:8].bfloat16().tolist() for tensor in local_tensors]
    return hashlib.sha256(str(values).encode()).hexdigest()
