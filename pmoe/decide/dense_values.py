"""Digests of parameters' values, which ranks compare in place of the values."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from pmoe.call.modules import Parts
from pmoe.experts.base import is_expert, local_part

MOST_VALUES = 1 << 16
"""How many values of one tensor are read at most, evenly spread. A router seldom has more; a shared expert
has."""

DENSE = ("gate", "shared_expert", "shared_gate", "callbacks")
"""The parts of a layer that every rank must have with the same values."""

SAME_VALUES = (
    "Build the model under the same torch.manual_seed on every rank, or wrap it by "
    "DistributedDataParallel(pmoe.parallelize(model, mesh)), or send rank 0's values to all: "
    "torch.distributed.broadcast(parameter.data, src=0)"
)
"""For messages: how to give the dense part the same values on all ranks."""


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes, types and the bits of values; "" for no tensors. Waits for a GPU.

    Tensors without readable values (on the meta device, not yet materialised, of a subclass that keeps them
    in its own way) count by name, shape and type only.
    """
    if not tensors:
        return ""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        local = local_part(tensor)
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if local.is_meta or type(local) not in (Tensor, nn.Parameter) or not local.numel():
            continue
        flat = local.detach().reshape(-1)
        step = -(-flat.numel() // MOST_VALUES)
        values = flat[::step].cpu().contiguous()
        found.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return found.hexdigest()


def dense_tensors(parts: Parts, part: str) -> dict[str, Tensor]:
    """The tensors of one of `DENSE` whose values can be compared, by name; the same names on every rank.

    These are parameters, and the buffers of pmoe's own gates that state dicts hold. Left out are tensors that
    are split over ranks (sharded DTensors, Megatron's tensor-parallel weights), experts' parameters, and
    callbacks that have no hook inside the layer: ranks may have different ones.
    """
    if part == "callbacks":
        modules = () if parts.hooks is None else parts.hooks.modules
        roots = {f"callbacks.{at}": module for at, module in enumerate(modules)}
    else:
        module = getattr(parts, part)
        roots = {} if module is None else {part: module}
    return {name: tensor for root, module in roots.items() for name, tensor in _tensors_of(root, module)}


def dense_values(parts: Parts) -> dict[str, str]:
    """A digest of the values of each part, by the names of `DENSE`."""
    return {part: fingerprint(dense_tensors(parts, part)) for part in DENSE}


def _tensors_of(root: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if not (_lies_in_parts(parameter) or is_expert(parameter)):
            yield f"{root}.{name}", parameter
    if type(module).__module__.startswith("pmoe.gates."):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not _lies_in_parts(buffer):
                yield f"{root}.{name}", buffer


def _lies_in_parts(tensor: Tensor) -> bool:
    placements = getattr(tensor, "placements", ())
    return getattr(tensor, "tensor_model_parallel", False) or not all(
        each.is_replicate() for each in placements
    )
