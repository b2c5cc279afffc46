"""Digests of parameter values. Ranks compare the digests instead of the values."""

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
"""The largest number of values that a digest reads of one tensor. They are evenly spread over it.

Few routers have more values than this; a shared expert does.
"""

DENSE = ("gate", "shared_expert", "shared_gate", "callbacks")
"""The dense parts of a layer: every rank holds them, and must hold the same values."""

SAME_VALUES = (
    "Build the model under the same torch.manual_seed on every rank, or wrap it by "
    "DistributedDataParallel(pmoe.parallelize(model, mesh)), or send rank 0's values to all: "
    "torch.distributed.broadcast(parameter.data, src=0)"
)
"""The end of messages: how to give the dense parts the same values on all ranks."""


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Returns a digest of the tensors' names, shapes, dtypes and values, bit by bit; "" for no tensors.

    The host reads the values, so it waits for a GPU. Only name, shape and dtype count for a tensor without
    readable values: on the meta device, not yet materialised, or of a subclass that stores them in its own
    way.
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
    """Returns the tensors of a dense part whose values ranks can compare, by name.

    These are its parameters, and the buffers of pmoe's own gates that state dicts hold. Every rank has the
    same names. Left out is what may differ between ranks:

    - tensors that are split over ranks (sharded DTensors, Megatron's tensor-parallel weights);
    - parameters of experts;
    - callbacks that have no hook inside the layer.

    part: a name of `DENSE`.
    """
    if part == "callbacks":
        hook_modules = () if modules.hooks is None else modules.hooks.modules
        roots = {f"callbacks.{place}": module for place, module in enumerate(hook_modules)}
    else:
        module = getattr(modules, part)
        roots = {} if module is None else {part: module}
    return {name: tensor for root, module in roots.items() for name, tensor in _tensors_of(root, module)}


def dense_values(modules: LayerModules) -> dict[str, str]:
    """Returns a digest of the values of each dense part, by the names of `DENSE`."""
    return {part: fingerprint(dense_tensors(modules, part)) for part in DENSE}


def _tensors_of(root: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that `dense_tensors` compares of one module, each with a name below ``root``."""
    for name, parameter in module.named_parameters():
        if not (_lies_in_parts(parameter) or is_expert(parameter)):
            yield f"{root}.{name}", parameter
    if type(module).__module__.startswith("pmoe.gates."):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not _lies_in_parts(buffer):
                yield f"{root}.{name}", buffer


def _lies_in_parts(tensor: Tensor) -> bool:
    """Returns whether a tensor is split over ranks, so that each rank holds other values."""
    placements = getattr(tensor, "placements", ())
    return getattr(tensor, "tensor_model_parallel", False) or not all(
        placement.is_replicate() for placement in placements
    )
