"""Which tensors of a model and its optimizers a checkpoint holds, their names, and whether it fits.

Tensors are DCP's (torch.distributed.checkpoint) to write and read in place, each rank its own part: "model."
and the name of a parameter or buffer; "optimizer.", the name of a parameter and that of its state. All else
is plain: options of optimizers, by parameter, so that groups may be cut otherwise when it is loaded.

Names are those of one process: wrappers leave no trace, and experts that are modules are numbered among all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from pmoe.experts.base import local_part
from pmoe.experts.modules import ModuleExperts
from pmoe.layer import MoELayer

Plain = dict[str, Any]

RUN_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Options of optimizers that say how a step is computed, not which: they stay those of the new run."""


def check_group(model: nn.Module, num_ranks: int) -> None:
    """Raises ValueError where a layer is spread over more ranks than take part in a checkpoint, as where the
    process group was destroyed before."""
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer) and layer.ranks.size > num_ranks:
            raise ValueError(
                f"group (of size {num_ranks}) must be all ranks that hold the model together: "
                f"{name or 'model'} is spread over {layer.ranks.size}"
            )


class Names:
    """How a checkpoint names the tensors of a model and of its optimizers' states.

    Raises ValueError, by name, where ranks hold different experts under one name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._first_experts = dict[str, int]()
        for name, layer in model.named_modules():
            if isinstance(layer, MoELayer):
                _check_names_differ(name, layer)
                if isinstance(layer.parts.experts, ModuleExperts):
                    prefix = _unwrapped(model, f"{name}.experts.local".lstrip(".")) + "."
                    self._first_experts[prefix] = layer.first_expert
        self._by_parameter: dict[Tensor, str] = {
            parameter: self.stored(_unwrapped(model, name)) for name, parameter in model.named_parameters()
        }

    def stored(self, name: str) -> str:
        """For a name of ``get_model_state_dict``: experts that are modules are numbered among all experts.

        Example, on a rank whose first expert is 2: "experts.local.1.weight" -> "experts.local.3.weight".
        """
        for prefix, first in self._first_experts.items():
            if name.startswith(prefix):
                expert, _, rest = name[len(prefix) :].partition(".")
                return f"{prefix}{int(expert) + first}.{rest}"
        return name

    def of(self, parameter: Tensor) -> str:
        """Raises ValueError where the parameter is not the model's."""
        if parameter not in self._by_parameter:
            shape = tuple(parameter.shape)
            raise ValueError(f"optimizer (a parameter of shape {shape}) must be of the model's alone")
        return self._by_parameter[parameter]

    def of_this_rank(self, stored: Iterable[str]) -> set[str]:
        """Those that other ranks may not have. stored: with "model." or "optimizer." in front."""
        prefixes = tuple(self._first_experts)
        return {name for name in stored if name.partition(".")[2].startswith(prefixes)}


# ---- the model


def model_state(model: nn.Module, names: Names) -> tuple[dict[str, Tensor], Plain]:
    """Parameters and buffers, the model's own memory, by their names in the checkpoint; and, as plain data,
    extra states of modules."""
    found = state_dict.get_model_state_dict(model).items()
    state = {f"model.{names.stored(name)}": value for name, value in found}
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def set_model_state(model: nn.Module, names: Names, plain: Mapping[str, Any]) -> None:
    """After the tensors were read in place: hands the model all of its state, extra states included."""
    state = state_dict.get_model_state_dict(model)
    state_dict.set_model_state_dict(
        model, {name: plain.get(f"model.{names.stored(name)}", value) for name, value in state.items()}
    )


# ---- optimizers


def optimizer_state(names: Names, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], Plain]:
    """As `model_state`, of parameters that have any state. Raises ValueError where one is not the model's."""
    tensors, values, options = dict[str, Tensor](), dict[str, Plain](), dict[str, Plain]()
    for optimizer, group, parameter in _parameters_of(optimizers):
        name = names.of(parameter)
        options[name] = {key: value for key, value in group.items() if key not in RUN_OPTIONS}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value.detach()
            else:
                values.setdefault(name, {})[key] = value
    return tensors, {"options": options, "values": values}


def set_optimizer_state(
    names: Names, optimizers: Sequence[Optimizer], plain: Plain, metadata: Metadata
) -> None:
    """After the tensors were read in place: options, plain values, and no state where none was saved."""
    saved = _owners(metadata)
    for optimizer, group, parameter in _parameters_of(optimizers):
        name = names.of(parameter)
        if name in plain["values"]:
            optimizer.state[parameter].update(plain["values"][name])
        elif f"optimizer.{name}" not in saved:
            optimizer.state.pop(parameter, None)
        for key, value in plain["options"][name].items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def option_problems(names: Names, optimizers: Sequence[Optimizer], plain: Plain) -> list[str]:
    """Names groups whose parameters were saved with different options, and parameters without any."""
    problems, options = [], plain["options"]
    for group in (each for optimizer in optimizers for each in optimizer.param_groups):
        wanted = [names.of(parameter) for parameter in group["params"]]
        problems += [f"optimizer.{name} is missing" for name in wanted if name not in options]
        known = [name for name in wanted if name in options]
        for name in known[1:]:
            if options[name] != options[known[0]]:
                problems.append(
                    f"optimizer.{name} and optimizer.{known[0]}, now of one group, had other options"
                )
    return problems


def make_states(optimizers: Sequence[Optimizer]) -> None:
    """Gives every trained parameter the state that its optimizer keeps of it, where it has none yet.

    torch does it by a step with zero gradients and learning rates, for optimizers without any state or
    gradients: those that there are, and the options, are put aside meanwhile.
    """
    for optimizer in optimizers:
        parameters = [parameter for _, _, parameter in _parameters_of([optimizer])]
        if all(each in optimizer.state for each in parameters if each.requires_grad):
            continue
        states, gradients = dict(optimizer.state), [each.grad for each in parameters]
        options = [dict(group) for group in optimizer.param_groups]
        optimizer.state.clear()
        for each in parameters:
            each.grad = None
        try:
            state_dict._init_optim_state(optimizer)
        finally:
            optimizer.state.update(states)
            for each, gradient in zip(parameters, gradients, strict=True):
                each.grad = gradient
            for group, before in zip(optimizer.param_groups, options, strict=True):
                group.update(before)


# ---- what was saved


def of_saved(tensors: Mapping[str, Tensor], metadata: Metadata) -> dict[str, Tensor]:
    """Without states of parameters of which none was saved: those had no gradient yet."""
    saved = _owners(metadata)
    return {name: each for name, each in tensors.items() if name.rpartition(".")[0] in saved}


def problems_of(
    wanted: Mapping[str, Tensor], all_names: set[str], metadata: Metadata, part: str
) -> list[str]:
    """How the tensors saved under "part." differ from this rank's, and their names from all ranks' names."""
    found = {name: each for name, each in metadata.state_dict_metadata.items() if name.startswith(f"{part}.")}
    problems = [f"{name} is missing in it" for name in sorted(all_names - set(found))]
    problems += [f"{name} is in it alone" for name in sorted(set(found) - all_names)]
    for name in sorted(set(found) & set(wanted)):
        tensor, known = wanted[name], found[name]
        if not isinstance(known, TensorStorageMetadata):
            problems.append(f"{name} is no tensor in it")
        elif known.size != tensor.shape:
            problems.append(f"{name} is {tuple(known.size)} in it, {tuple(tensor.shape)} here")
        elif known.properties.dtype != tensor.dtype:
            problems.append(f"{name} is {known.properties.dtype} in it, {tensor.dtype} here")
    return problems


def in_boxes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same memory, as DCP must be given it.

    Of a gated expert's w1 or b1 each half is split over "esp", so that a rank holds two boxes of the whole.
    DCP takes a DTensor's part for one box: it refuses to save those, which overlap, and loads wrong rows.
    """
    return {name: _in_boxes(tensor) for name, tensor in tensors.items()}


def _in_boxes(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    split = next((each for each in tensor.placements if isinstance(each, _StridedShard)), None)
    if split is None:
        return tensor
    dim, count = split.dim, int(split.split_factor)
    parts = list(local_part(tensor).chunk(count, dim))
    first = [0] * tensor.ndim
    for at, placement in zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True):
        along = getattr(placement, "dim", None)  # None where it is replicated
        if along is not None:
            first[along] = at * parts[0].shape[along]
    half = tensor.shape[dim] // count
    offsets = [(*first[:dim], first[dim] + number * half, *first[dim + 1 :]) for number in range(count)]
    return DTensor(LocalShardsWrapper(parts, offsets), tensor._spec, requires_grad=False)


# ---- names and walks


def _check_names_differ(name: str, layer: MoELayer) -> None:
    if layer.ranks.size == 1 or isinstance(layer.parts.experts, ModuleExperts):
        return
    if not layer.parts.experts.is_parallelized or layer.parts.experts.hidden_dims() is None:
        kind = type(layer.experts).__name__
        raise ValueError(
            f"{name or 'model'} (of {layer.ranks}, experts {kind}) must hold its experts as DTensors or "
            "as modules to be told apart in a checkpoint: see pmoe.parallelize"
        )


def _unwrapped(model: nn.Module, name: str) -> str:
    """Without what DistributedDataParallel, torch.compile and checkpoint_wrapper add, in any order."""
    (found,) = state_dict._get_fqns(model, name)
    return found


def _parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
    """Each parameter, with its optimizer and group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter


def _owners(metadata: Metadata) -> set[str]:
    """Names of parameters, with "optimizer." or "model." in front, of which something was saved."""
    return {name.rpartition(".")[0] for name in metadata.state_dict_metadata}
