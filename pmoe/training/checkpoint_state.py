"""What of a model and its optimizers is in a checkpoint, under which names, and whether a checkpoint fits.

Tensors are DCP's (torch.distributed.checkpoint) to write and read in place, each rank its own part: "model."
and the name of a parameter or buffer; "optimizer.", the name of a parameter and that of its state. All else
is plain: options of optimizers, by parameter, so that groups may be cut otherwise when it is loaded.

Names are those of one process: wrappers leave no trace in them, and experts that are modules are numbered
among all experts, not among this rank's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pmoe.experts import ModuleExperts
from pmoe.experts.base import local_part
from pmoe.layer import MoELayer

Plain = dict[str, Any]

OF_THE_RUN = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Options of optimizers that say how a step is computed, not which: they stay those of the new run."""

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""What activation checkpointing and torch.compile add to names."""


@dataclass(frozen=True)
class State:
    """One rank's part. tensors: by their names in the checkpoint, the memory of the model and the optimizers
    itself. plain: what is no tensor. own: those names of tensors that other ranks may not have."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: Plain = field(default_factory=dict)
    own: frozenset[str] = frozenset()


def model_state(model: nn.Module) -> State:
    """Raises ValueError, by name, where ranks hold different experts under one name."""
    _check_layers(model)
    renamed = _global_names(model)
    tensors, plain, own = dict[str, Tensor](), Plain(), set[str]()
    for name, value in get_model_state_dict(model).items():
        there = "model." + _in_checkpoint(name, renamed)
        if isinstance(value, Tensor):
            tensors[there] = _as_stored(value)
        else:
            plain[there] = value
        if there != f"model.{name}" or any(name.startswith(prefix) for prefix in renamed):
            own.add(there)
    return State(tensors, plain, frozenset(own))


def set_model_state(model: nn.Module, plain: Mapping[str, Any]) -> None:
    """After the tensors were read in place: hands the model all of its state, what is no tensor included."""
    renamed = _global_names(model)
    state = dict[str, Any](get_model_state_dict(model))
    for name in state:
        there = "model." + _in_checkpoint(name, renamed)
        if there in plain:
            state[name] = plain[there]
    set_model_state_dict(model, state)


def optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """Of the parameters that have any state. Raises ValueError where a parameter is not the model's."""
    renamed, names = _global_names(model), parameter_names(model)
    tensors, values, options = dict[str, Tensor](), dict[str, Plain](), dict[str, Plain]()
    own = set[str]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"optimizer (a parameter of shape {shape}) must be of the model's alone")
                name = names[parameter]
                there = _in_checkpoint(name, renamed)
                options[there] = {key: value for key, value in group.items() if key not in OF_THE_RUN}
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer.{there}.{key}"] = _as_stored(value)
                        if any(name.startswith(prefix) for prefix in renamed):
                            own.add(f"optimizer.{there}.{key}")
                    else:
                        values.setdefault(there, {})[key] = value
    return State(tensors, {"options": options, "values": values}, frozenset(own))


def set_optimizer_state(
    model: nn.Module, optimizers: Sequence[Optimizer], plain: Plain, stored: Metadata
) -> None:
    """After the tensors were read in place: options, what is no tensor, and no state where none was saved."""
    renamed, names = _global_names(model), parameter_names(model)
    saved = {name.rpartition(".")[0] for name in stored.state_dict_metadata if name.startswith("optimizer.")}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                there = _in_checkpoint(names[parameter], renamed)
                if f"optimizer.{there}" not in saved and there not in plain["values"]:
                    optimizer.state.pop(parameter, None)
                elif there in plain["values"]:
                    optimizer.state[parameter].update(plain["values"][there])
            for key, value in _options_of(group, names, renamed, plain).items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value


def option_problems(model: nn.Module, optimizers: Sequence[Optimizer], plain: Plain) -> list[str]:
    """Groups whose parameters were saved with different options, and parameters without any."""
    renamed, names = _global_names(model), parameter_names(model)
    problems = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        there = [_in_checkpoint(names[parameter], renamed) for parameter in group["params"]]
        problems += [f"optimizer.{name} is missing" for name in there if name not in plain["options"]]
        known = [name for name in there if name in plain["options"]]
        for name in known[1:]:
            if not _alike(plain["options"][name], plain["options"][known[0]]):
                problems.append(
                    f"optimizer.{name} and optimizer.{known[0]}, now of one group, had other options"
                )
    return problems


def problems_of(wanted: Mapping[str, Tensor], all_names: set[str], stored: Metadata, part: str) -> list[str]:
    """How what is stored under names of ``part`` differs from this rank's tensors and all ranks' names."""
    found = {name: each for name, each in stored.state_dict_metadata.items() if name.startswith(f"{part}.")}
    problems = [f"{name} is missing in it" for name in sorted(all_names - set(found))]
    problems += [f"{name} is in it alone" for name in sorted(set(found) - all_names)]
    for name in sorted(set(found) & set(wanted)):
        tensor, known = wanted[name], found[name]
        assert isinstance(known, TensorStorageMetadata)
        if known.size != tensor.shape:
            problems.append(f"{name} is {tuple(known.size)} in it, {tuple(tensor.shape)} here")
        elif known.properties.dtype != tensor.dtype:
            problems.append(f"{name} is {known.properties.dtype} in it, {tensor.dtype} here")
    return problems


def make_states(optimizers: Sequence[Optimizer]) -> None:
    """Gives every parameter that is trained the state that its optimizer keeps of it, where it has none yet:
    by a step with zero gradients and learning rates, beside the states and gradients that there are."""
    for optimizer in optimizers:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if all(parameter in optimizer.state for parameter in trained):
            continue
        before, gradients = dict(optimizer.state), [parameter.grad for parameter in trained]
        optimizer.state.clear()
        try:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            with _without_learning(optimizer):
                optimizer.step()
        finally:
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            optimizer.state.update(before)


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """As they are in a state dict of the model without its wrappers."""
    names = dict[Tensor, str]()
    for name, parameter in model.named_parameters():
        names[parameter] = _unwrapped(model, name)
    return names


@contextlib.contextmanager
def _without_learning(optimizer: Optimizer) -> Iterator[None]:
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _options_of(
    group: Mapping[str, Any], names: Mapping[Tensor, str], renamed: Mapping[str, int], plain: Plain
) -> Plain:
    if not group["params"]:
        return {}
    found: Plain = plain["options"][_in_checkpoint(names[group["params"][0]], renamed)]
    return found


def _alike(some: Plain, others: Plain) -> bool:
    return some.keys() == others.keys() and all(bool(value == others[key]) for key, value in some.items())


def _check_layers(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if (
            not isinstance(layer, MoELayer)
            or layer.ranks.size == 1
            or isinstance(layer.experts, ModuleExperts)
        ):
            continue
        if not layer.experts.is_parallelized or layer.experts.hidden_dims() is None:
            kind = type(layer.experts).__name__
            raise ValueError(
                f"{name or 'model'} (of {layer.ranks}, experts {kind}) must hold its experts as DTensors or "
                "as modules to be told apart in a checkpoint: see pmoe.parallelize"
            )


def _global_names(model: nn.Module) -> dict[str, int]:
    """By the prefix of experts that are modules, the number of this rank's first."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer) and isinstance(layer.experts, ModuleExperts):
            found[_unwrapped(model, f"{name}.experts.local.".lstrip("."))] = layer.first_expert
    return found


def _in_checkpoint(name: str, renamed: Mapping[str, int]) -> str:
    for prefix, first in renamed.items():
        if name.startswith(prefix):
            expert, _, rest = name[len(prefix) :].partition(".")
            return f"{prefix}{int(expert) + first}.{rest}"
    return name


def _unwrapped(model: nn.Module, name: str) -> str:
    parts, module, kept = name.split("."), model, []
    for part in parts:
        if part not in WRAPPERS and not (part == "module" and isinstance(module, DistributedDataParallel)):
            kept.append(part)
        module = getattr(module, part, module) if part else module
    return ".".join(kept)


def _as_stored(value: Tensor) -> Tensor:
    value = value.detach()
    halves = [p for p in getattr(value, "placements", ()) if isinstance(p, _StridedShard)]
    return _Halves.of(value, halves[0]) if halves and isinstance(value, DTensor) else value


class _Halves(Tensor):
    """A gated expert's w1 or b1, each of whose halves is split over "esp": to DCP, a tensor of which this
    rank has two boxes. Of a DTensor it knows one."""

    parts: list[Tensor]
    chunks: list[ChunkStorageMetadata]

    @staticmethod
    def __new__(cls, tensor: DTensor, parts: list[Tensor], chunks: list[ChunkStorageMetadata]) -> _Halves:
        made: _Halves = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        made.parts, made.chunks = parts, chunks
        return made

    @staticmethod
    def of(tensor: DTensor, split: _StridedShard) -> _Halves:
        mesh, dim, count = tensor.device_mesh, split.dim, int(split.split_factor)
        parts = list(local_part(tensor).chunk(count, dim))
        offsets = [0] * tensor.ndim
        for at, placement in zip(mesh.get_coordinate() or (), tensor.placements, strict=True):
            if placement == split:
                offsets[dim] = at * parts[0].shape[dim]
            elif placement.is_shard():
                offsets[placement.dim] = at * parts[0].shape[placement.dim]  # type: ignore[attr-defined]
        chunks = []
        for number, part in enumerate(parts):
            place = list(offsets)
            place[dim] += number * (tensor.shape[dim] // count)
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(place), sizes=part.shape))
        return _Halves(tensor, parts, chunks)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of what is only to be saved or loaded")

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.parts[0])
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(
            part for part, chunk in zip(self.parts, self.chunks, strict=True) if chunk.offsets == index.offset
        )
