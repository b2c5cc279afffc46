"""Digests of the values of parameters. Ranks compare these digests instead of sending the values.

A digest is a hash. Every rank holds the whole gate, the whole shared expert and all callbacks: these are the
replicated parts of a layer. Their values must be equal on all ranks. Experts are not replicated.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pmoe.call.modules import LayerModules
from pmoe.experts.marks import is_expert
from pmoe.experts.operands import local_part

MOST_VALUES = 1 << 16
"""The largest number of values of one tensor that a digest reads.

Most gates have fewer values, so all of them are read. A shared expert has more, so only a sample of its
values is read, evenly spread over the tensor.
"""

DENSE = ("gate", "shared_expert", "shared_gate", "latent", "callbacks")
"""The parts of a layer that every rank holds as a whole. Their values must be equal on all ranks."""

SAME_VALUES = (
    "Build the model under the same torch.manual_seed on every rank, or wrap it by "
    "DistributedDataParallel(pmoe.parallelize(model, mesh)), or send rank 0's values to all: "
    "torch.distributed.broadcast(parameter.data, src=0)"
)
"""The last sentence of error messages: how to get equal values of the replicated parts on all ranks."""


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Returns a digest of the names, shapes, dtypes and values (bit by bit) of tensors; "" for no tensors.

    If a tensor is large, only a sample of `MOST_VALUES` of its values is read. The values are copied to the
    host, so the host waits for a GPU. The digest leaves out the values of tensors on the meta device,
    uninitialised parameters, and tensor subclasses that store values in a format of their own.
    """
    if not tensors:
        return ""
    hashed = hashlib.sha256()
    for name, tensor in tensors.items():
        local = local_part(tensor)
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if local.is_meta or type(local) not in (Tensor, nn.Parameter) or not local.numel():
            continue
        flat = local.detach().reshape(-1)
        step = -(-flat.numel() // MOST_VALUES)
        values = flat[::step].cpu().contiguous()
        hashed.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return hashed.hexdigest()


def dense_tensors(modules: LayerModules, part: str) -> dict[str, Tensor]:
    """Returns those tensors of one part of the layer that must be equal on all ranks, by name.

    The result has the part's parameters and, for pmoe's own gates, also the buffers that state dicts hold.
    The names are the same on every rank. Tensors that may differ between ranks are left out:

    - tensors that are split over ranks (sharded DTensors, Megatron's tensor-parallel weights);
    - parameters of experts;
    - tensors of callbacks, unless a callback runs between the gate and the end of combine.

    modules: the modules and options of the layer.
    part: the name of the part: "gate", "shared_expert", "shared_gate", "latent" or "callbacks" (`DENSE`).
    """
    if part == "callbacks":
        hook_modules = () if modules.hooks is None else modules.hooks.modules
        roots = {f"callbacks.{place}": module for place, module in enumerate(hook_modules)}
    else:
        module = getattr(modules, part)
        roots = {} if module is None else {part: module}
    return {name: tensor for root, module in roots.items() for name, tensor in _tensors_of(root, module)}


def dense_values(modules: LayerModules) -> dict[str, str]:
    """Returns a digest of the values of each replicated part. The keys are the parts' names in `DENSE`."""
    return {part: fingerprint(dense_tensors(modules, part)) for part in DENSE}


def _tensors_of(root: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of one module that must be equal on all ranks, each with its name.

    root: the name of the module in the layer; the names of the tensors begin with it.
    module: the module.
    """
    for name, parameter in module.named_parameters():
        if not (_lies_in_parts(parameter) or is_expert(parameter)):
            yield f"{root}.{name}", parameter
    if type(module).__module__.startswith("pmoe.gates."):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not _lies_in_parts(buffer):
                yield f"{root}.{name}", buffer


def _lies_in_parts(tensor: Tensor) -> bool:
    """Returns whether this rank has only a part of a tensor: ranks then have different values.

    This is true of a sharded DTensor, and of a tensor-parallel weight of Megatron.
    """
    placements = getattr(tensor, "placements", ())
    return getattr(tensor, "tensor_model_parallel", False) or not all(
        placement.is_replicate() for placement in placements
    )
