"""Refuses data-parallel wrappers that treat the ranks' experts as copies of each other.

Each rank holds different experts. A data-parallel wrapper that manages them broadcasts one rank's experts to
all, or treats the ranks' experts as shards of one tensor. The model would still train, and the result would
be wrong. So the wrapper is an error, whose message shows the line to add.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pmoe.experts.base import Experts
from pmoe.experts.marks import is_expert, is_flattened
from pmoe.experts.operands import local_part, parameters_own_first
from pmoe.experts.values import has_values

DDP, FSDP2, FSDP1 = "DistributedDataParallel", "fully_shard", "FullyShardedDataParallel"
OWN = "pmoe.expert_parameters(model)"
RIGHT = {
    DDP: f"{DDP}(pmoe.parallelize(model, mesh)), after every module inside it is wrapped",
    FSDP2: f"pmoe.parallelize(model, mesh), then {FSDP2}(..., ignored_params={OWN}). To shard experts over "
    "their copies, pass shard_experts=True to parallelize",
    FSDP1: f"pmoe.parallelize(model, mesh), then {FSDP1}(model, ignored_states={OWN}). In Lightning, use "
    "ModelParallelStrategy and fully_shard",
}
"""The right way to wrap a model, as a line for error messages, by the name of the wrapper."""

COPIED = (
    "experts must differ from rank to rank, but all ranks have those of one: they were copied by "
    f"dist.broadcast, an optimizer or a wrapper. Exclude {OWN} from it, or build the model again and wrap it "
    f"by {RIGHT[DDP]}"
)
"""The error for experts that are equal on all ranks although they were built to differ."""


def may_be_wrapped(experts: Experts) -> bool:
    """Returns whether a data-parallel wrapper may manage the experts. If not, none does.

    The test is quick. Each call makes it, and `check_wrapped` follows only if it is True.
    """
    parameter = next(parameters_own_first(experts), None)
    ddp = DistributedDataParallel._get_active_ddp_module()
    # FSDP replaces the parameters that it manages, and the new parameters have no mark.
    return parameter is None or not is_expert(parameter) or ddp is not None


def check_wrapped(experts: Experts, own: set[int]) -> None:
    """Raises ValueError on every rank if a data-parallel wrapper would mix different ranks' experts.

    experts: the layer's experts.
    own: the global ranks over which the layer's experts are spread.

    A wrapper is refused if it spans more than one of these ranks, because they hold different experts. If
    several groups of ranks each hold a copy of all experts of the layer, a wrapper may span one rank of each
    group, because these ranks hold the same experts. The ranks of a FullyShardedDataParallel wrapper (FSDP1)
    cannot be read. An FSDP1 wrapper is refused if the layer's experts are spread over all ranks of the job,
    because any group of several ranks then mixes different experts.

    If `pmoe.parallelize` has changed the model, its experts must not be in any wrapper, because their
    gradients are averaged already. The only exception is ``shard_experts``: FSDP2 then averages the
    gradients, and is itself the experts' wrapper.
    """
    for wrapper, ranks in _wrappers(experts):
        if wrapper == FSDP2 and experts.is_sharded:
            continue
        mixes = len(ranks & own) > 1 if ranks else len(own) == dist.get_world_size()
        if mixes or experts.is_parallelized:
            raise ValueError(
                f"experts' parameters must not be in {wrapper}, which treats them as the same on every rank. "
                f"Build the model again and wrap it by {RIGHT[wrapper]}"
            )


def check_peft(experts_module: nn.Module) -> None:
    """Raises ValueError if PEFT adapts stacked weights of experts that are spread over several ranks.

    PEFT does so with its argument ``target_parameters``. Its adapter would hold the matrices of this rank's
    experts only, under the same name on every rank. So PEFT would save the matrices of one rank only, and
    could not load them on another number of ranks.

    experts_module: the module that the layer has as its experts, which PEFT may have wrapped.
    """
    for module in experts_module.modules():
        kind = type(module)
        if kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft."):
            raise ValueError(
                f"target_parameters (with {module.parameter_name} of experts) must leave out experts that "
                "are spread over ranks: PEFT would save the adapters of one rank as if these were all. Call "
                "pmoe.add_lora(model, rank=...) after peft.get_peft_model, which adapts the rest"
            )


def _wrappers(experts: Experts) -> Iterator[tuple[str, set[int]]]:
    """Yields each data-parallel wrapper that manages parameters of these experts: (name, its global ranks).

    For FullyShardedDataParallel (FSDP1) the set is empty, because its ranks cannot be read.
    """
    parameters = {id(value) for value in experts.parameters()}
    modules = set(experts.modules())
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp and any(id(value) in parameters for value in ddp._module_parameters if value.requires_grad):
        yield DDP, set(dist.get_process_group_ranks(ddp.process_group))
    # fully_shard imports the module below. If it is not imported yet, there is no FSDP2 wrapper.
    states = sys.modules.get("torch.distributed._composable_state")
    for state in [] if states is None else list(states._module_state_mapping.values()):
        for group in getattr(state(), "_fsdp_param_groups", ()):
            if any(value._module_info.module in modules for value in group.fsdp_params):
                yield FSDP2, set(group.mesh_info.mesh.mesh.flatten().tolist())
    bases = (getattr(value, "_base", None) for module in modules for value in vars(module).values())
    # The older FSDP turns parameters into views of one flat tensor, which has this mark, sharded or whole.
    if any(base is not None and is_flattened(base) for base in bases):
        yield FSDP1, set()


@torch.no_grad()
def sampled(experts: Experts) -> str:
    """Returns a digest of the first 8 values of each parameter, as bfloat16; "" on the meta device.

    Ranks compare their digests to notice that experts, which should differ, are equal.
    """
    local_tensors = [local_part(tensor) for tensor in experts.parameters()]
    if not all(map(has_values, local_tensors)):
        return ""
    values = [tensor.reshape(-1)[:8].bfloat16().tolist() for tensor in local_tensors]
    return hashlib.sha256(str(values).encode()).hexdigest()
