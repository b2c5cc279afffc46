"""Collects the tensors of a model and its optimizers under the names that they have in a checkpoint.

It also checks that the tensors of a saved checkpoint fit the model and optimizers of this run.

    model.NAME              a parameter or buffer
    optimizer.NAME.KEY      the state KEY (such as exp_avg) of the parameter NAME

torch.distributed.checkpoint (DCP) writes these tensors and reads into them in place, each rank its own part.
Everything else is plain data. An optimizer's options are stored for each parameter and not for each parameter
group, so that a run may load them into other groups.

NAME is the name that the tensor has in a single process with all experts. So wrappers of the model add
nothing to it. If experts are a user's modules, NAME has the expert's index among the experts of all ranks.
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

from pmoe.experts.dtensor_layout import hold_own_parts
from pmoe.experts.lora import Adapter
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.operands import local_part
from pmoe.layer import MoELayer

Plain = dict[str, Any]

RUN_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Entries of an optimizer's parameter group that are not saved.

These entries are the parameters, and options for how a step is computed. When a checkpoint is loaded, the
entries stay as the new run has set them.
"""


def check_group(model: nn.Module, num_ranks: int) -> None:
    """Raises ValueError if a layer's experts are spread over more ranks than take part in the checkpoint.

    One cause: the process group was destroyed before the checkpoint.

    model: the model with the layers.
    num_ranks: number of ranks that take part.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer) and layer.ranks.size > num_ranks:
            raise ValueError(
                f"group (of size {num_ranks}) must be all ranks that hold the model together: "
                f"the number of ranks of {name or 'model'} is {layer.ranks.size}"
            )


class Names:
    """Maps the parameters of a model to their names in a checkpoint, which do not depend on the ranks.

    Raises ValueError, with the layer's name, if ranks hold different experts under one name.
    """

    def __init__(self, model: nn.Module) -> None:
        hold_own_parts(model)
        self._first_experts = dict[str, int]()
        for name, layer in model.named_modules():
            if isinstance(layer, Adapter):
                _check_adapter(name, layer)
            if isinstance(layer, MoELayer):
                _check_names_differ(name, layer)
                if isinstance(layer.layer_modules.experts, ModuleExperts):
                    prefix = unwrapped(model, f"{name}.experts.local".lstrip(".")) + "."
                    self._first_experts[prefix] = layer.first_expert
        self._by_parameter: dict[Tensor, str] = {
            parameter: self.stored(unwrapped(model, name)) for name, parameter in model.named_parameters()
        }

    def stored(self, name: str) -> str:
        """Returns the name that a tensor has in the checkpoint.

        name: the name that torch's get_model_state_dict gives to the tensor.

        The two names differ only for tensors of experts that are a user's modules, because each rank numbers
        its modules from 0 and the checkpoint numbers all experts.

        Example, on a rank whose first expert is 2: "experts.local.1.weight" -> "experts.local.3.weight".
        """
        for prefix, first in self._first_experts.items():
            if name.startswith(prefix):
                expert, _, rest = name[len(prefix) :].partition(".")
                return f"{prefix}{int(expert) + first}.{rest}"
        return name

    def of(self, parameter: Tensor) -> str:
        """Returns the name of a parameter in the checkpoint.

        parameter: a parameter of any shape.

        Raises ValueError if it is not a parameter of the model.
        """
        if parameter not in self._by_parameter:
            shape = tuple(parameter.shape)
            raise ValueError(
                f"optimizer (a parameter of shape {shape}) must have parameters of the model only"
            )
        return self._by_parameter[parameter]

    def of_this_rank(self, stored: Iterable[str]) -> set[str]:
        """Selects the names of the tensors that only this rank has.

        These are the tensors of experts that are a user's modules. All other tensors have the same name on
        every rank.

        stored: names of this rank's tensors in the checkpoint, each with "model." or "optimizer." in front.
        """
        prefixes = tuple(self._first_experts)
        return {name for name in stored if name.partition(".")[2].startswith(prefixes)}


# ---- the model


def model_state(model: nn.Module, names: Names) -> tuple[dict[str, Tensor], Plain]:
    """Returns a model's tensors, and the extra states of its modules: two dicts by name in the checkpoint.

    The tensors, of any shape, share memory with the model. Extra states (`torch.nn.Module.get_extra_state`)
    are plain data.

    model: the model.
    names: maps parameters to their names in the checkpoint.
    """
    items = state_dict.get_model_state_dict(model).items()
    state = {f"model.{names.stored(name)}": value for name, value in items}
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def set_model_state(model: nn.Module, names: Names, plain: Mapping[str, Any]) -> None:
    """Sets the extra states of a model's modules, and runs the hooks for load_state_dict.

    torch.distributed.checkpoint must have read the model's tensors in place before this call.

    model: the model.
    names: maps parameters to their names in the checkpoint.
    plain: saved extra states, by their names in the checkpoint.
    """
    state = state_dict.get_model_state_dict(model)
    state_dict.set_model_state_dict(
        model, {name: plain.get(f"model.{names.stored(name)}", value) for name, value in state.items()}
    )


# ---- optimizers


def optimizer_state(names: Names, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], Plain]:
    """Returns the state tensors by name, and the plain data, of all parameters of some optimizers.

    The tensors, of any shape, have the names "optimizer.NAME.KEY", such as "optimizer.w.exp_avg". The plain
    data are two dicts, each keyed by the parameter's name: "options" has the options of the parameter's
    group, "values" has its optimizer states that are not tensors.

    names: maps parameters to their names in the checkpoint.
    optimizers: the optimizers.

    Raises ValueError if a parameter of an optimizer is not the model's.
    """
    tensors = dict[str, Tensor]()
    values = dict[str, Plain]()
    options = dict[str, Plain]()
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
    """Sets the optimizers' options, and their states that are not tensors.

    Before this call, torch.distributed.checkpoint (DCP) must have read the states that are tensors. If no
    state was saved for a parameter, its state is removed from the optimizer.

    names: maps parameters to their names in the checkpoint.
    optimizers: the optimizers.
    plain: the saved "options" and "values", by name of the parameter.
    metadata: DCP's list of the saved tensors.
    """
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
    """Returns the reasons why saved options of optimizers cannot be loaded, one text each; [] if they can.

    There are two reasons: a parameter has no saved options, or parameters that share a parameter group in
    this run were saved with different options.

    names: maps parameters to their names in the checkpoint.
    plain: the saved "options", by name of the parameter.
    """
    problems = []
    options = plain["options"]
    for group in (param_group for optimizer in optimizers for param_group in optimizer.param_groups):
        names_in_group = [names.of(parameter) for parameter in group["params"]]
        problems += [f"optimizer.{name} is missing" for name in names_in_group if name not in options]
        saved = [name for name in names_in_group if name in options]
        for name in saved[1:]:
            if options[name] != options[saved[0]]:
                problems.append(
                    f"optimizer.{name} and optimizer.{saved[0]}, now in one group, had different options"
                )
    return problems


def make_states(optimizers: Sequence[Optimizer], names: Names, metadata: Metadata) -> None:
    """Creates the optimizer's state of every parameter that is trained, or has a saved state.

    A frozen parameter has a saved state if it was trained before it was frozen.

    torch creates states by a step with zero gradients and zero learning rates, but only for an optimizer
    without any state or gradient, and not for frozen parameters. So existing states, gradients and options
    are set aside during the step, and put back afterwards.

    optimizers: the optimizers.
    names: maps parameters to their names in the checkpoint.
    metadata: the list of the saved tensors that torch.distributed.checkpoint wrote.
    """
    saved = _owners(metadata)
    for optimizer in optimizers:
        parameters = [parameter for _, _, parameter in _parameters_of([optimizer])]
        frozen = [
            tensor
            for tensor in parameters
            if not tensor.requires_grad and f"optimizer.{names.of(tensor)}" in saved
        ]
        trained = [tensor for tensor in parameters if tensor.requires_grad]
        if all(tensor in optimizer.state for tensor in (*trained, *frozen)):
            continue
        states = dict(optimizer.state)
        gradients = [tensor.grad for tensor in parameters]
        options = [dict(group) for group in optimizer.param_groups]
        optimizer.state.clear()
        for tensor in parameters:
            tensor.grad = None
        for tensor in frozen:
            tensor.requires_grad_(True)
        try:
            state_dict._init_optim_state(optimizer)
        finally:
            for tensor in frozen:
                tensor.requires_grad_(False)
            optimizer.state.update(states)
            for tensor, gradient in zip(parameters, gradients, strict=True):
                tensor.grad = gradient
            for group, before in zip(optimizer.param_groups, options, strict=True):
                group.update(before)


# ---- what was saved


def of_saved(tensors: Mapping[str, Tensor], metadata: Metadata) -> dict[str, Tensor]:
    """Selects the state tensors that an optimizer can load: the tensors of parameters with a saved state.

    A parameter has no saved state if it had not got a gradient before the checkpoint was saved.

    tensors: the optimizer's state tensors, of any shape, by their names in the checkpoint.
    metadata: the list of the saved tensors that torch.distributed.checkpoint wrote.
    """
    saved = _owners(metadata)
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in saved}


def problems_of(
    wanted: Mapping[str, Tensor], all_names: set[str], metadata: Metadata, part: str
) -> list[str]:
    """Returns the reasons why saved tensors do not fit a model or optimizer, one text each; [] if they fit.

    A tensor may be missing in the checkpoint, be in the checkpoint only, or have another shape or dtype.

    wanted: this rank's tensors by their names in the checkpoint, of any shape.
    all_names: names of the tensors of all ranks.
    metadata: the list of the saved tensors that torch.distributed.checkpoint wrote.
    part: "model" or "optimizer": which saved tensors are compared.
    """
    saved = {
        name: entry for name, entry in metadata.state_dict_metadata.items() if name.startswith(f"{part}.")
    }
    problems = [f"{name} is not in it" for name in sorted(all_names - set(saved))]
    problems += [f"{name} is only in it" for name in sorted(set(saved) - all_names)]
    for name in sorted(set(saved) & set(wanted)):
        tensor = wanted[name]
        saved_tensor = saved[name]
        if not isinstance(saved_tensor, TensorStorageMetadata):
            problems.append(f"{name} is not a tensor in it")
        elif saved_tensor.size != tensor.shape:
            problems.append(
                f"{name} has shape {tuple(saved_tensor.size)} in it, {tuple(tensor.shape)} in this run"
            )
        elif saved_tensor.properties.dtype != tensor.dtype:
            problems.append(f"{name} has {saved_tensor.properties.dtype} in it, {tensor.dtype} in this run")
    return problems


def in_boxes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Describes this rank's part of a split w1 or b1 to torch.distributed.checkpoint as two blocks.

    The function is for gated experts, such as SwiGLU experts, that are split over ranks. It returns all
    tensors by name, of any shape. A split w1 or b1 is returned as an object that describes its two blocks
    ("boxes"); all other tensors are returned unchanged.

    In the w1 and b1 of gated experts, the rows of the gate projection come first, then those of the up
    projection. If an expert's hidden columns are split over ranks (mesh dimension "esp"), each half is split.
    So a rank holds two separate blocks of the whole tensor:

        whole w1      gate 0 | gate 1 | up 0 | up 1
        rank 0 of 2   gate 0,           up 0
        rank 1 of 2            gate 1,         up 1

    torch.distributed.checkpoint assumes that a rank's part of a DTensor is one block. Without the boxes it
    would refuse to save these parts, because they overlap if each is taken for a single block. It would also
    load wrong rows.
    """
    return {name: _in_boxes(tensor) for name, tensor in tensors.items()}


def _in_boxes(tensor: Tensor) -> Tensor:
    """Describes this rank's part of one split w1 or b1 to torch.distributed.checkpoint as two blocks.

    The w1 and b1 of gated experts consist of two halves, the gate projection and the up projection. If the
    experts' hidden columns are split over ranks, each half is split. A rank then has a part of each half, so
    two separate blocks of the whole tensor (picture in `in_boxes`).

    The function recognises these tensors by their DTensor placement `_StridedShard`. Any other tensor, of any
    shape, is returned unchanged. FSDP2 also uses `_StridedShard`, if an inner mesh dimension splits the same
    dimension of a tensor. An example is transformers' experts over ("efsdp", "ep"). A rank's part of this
    tensor is one block, so the tensor is returned unchanged.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    split = _split_of_halves(tensor)
    if split is None:
        return tensor
    dim = split.dim
    count = int(split.split_factor)
    parts = list(local_part(tensor).chunk(count, dim))
    first = [_number_of_part(tensor, along) * length for along, length in enumerate(parts[0].shape)]
    half = tensor.shape[dim] // count
    offsets = [(*first[:dim], first[dim] + number * half, *first[dim + 1 :]) for number in range(count)]
    return DTensor(LocalShardsWrapper(parts, offsets), tensor._spec, requires_grad=False)


def _number_of_part(tensor: DTensor, dim: int) -> int:
    """Returns the number of this rank's part of a DTensor along one dimension. Parts are equal.

    The first part has the number 0.

    tensor: of any shape.
    dim: the dimension of the tensor.

    Mesh dimensions split a dimension of the tensor in the order of the mesh, with one exception: a mesh
    dimension with a `_StridedShard` splits the parts that all other mesh dimensions have made.
    """
    splits = [
        (isinstance(placement, _StridedShard), position, size)
        for placement, position, size in zip(
            tensor.placements,
            tensor.device_mesh.get_coordinate() or (),
            tensor.device_mesh.shape,
            strict=True,
        )
        if getattr(placement, "dim", None) == dim
    ]
    number = 0
    for _, position, size in sorted(splits, key=lambda split: split[0]):
        number = number * size + position
    return number


def _split_of_halves(tensor: DTensor) -> _StridedShard | None:
    """Returns the placement that splits each half of a w1 or b1 of gated experts; None for other tensors.

    tensor: of any shape.
    """
    for number, placement in enumerate(tensor.placements):
        inner_dims = {getattr(inner, "dim", None) for inner in tensor.placements[number + 1 :]}
        if isinstance(placement, _StridedShard) and placement.dim not in inner_dims:
            return placement
    return None


# ---- names and walks


def _check_names_differ(name: str, layer: MoELayer) -> None:
    """Raises ValueError if ranks hold different experts of a layer under the same names.

    The names cannot conflict in two cases:

    - The experts are DTensors. Each rank then saves its part of one tensor.
    - The experts are a user's modules. Names in the checkpoint then contain the expert's index among the
      experts of all ranks.

    name: name of the layer in the model, for the message.
    """
    if layer.ranks.size == 1 or isinstance(layer.layer_modules.experts, ModuleExperts):
        return
    if not layer.layer_modules.experts.is_parallelized or layer.layer_modules.experts.hidden_dims() is None:
        kind = type(layer.experts).__name__
        raise ValueError(
            f"{name or 'model'} (of {layer.ranks}, experts {kind}) must hold its experts as DTensors or "
            "as modules, so that a checkpoint can name them: call pmoe.parallelize(model, mesh)"
        )


def _check_adapter(name: str, adapter: Adapter) -> None:
    """Raises ValueError if ranks hold different parts of an adapter under the same names.

    name: name of the adapter in the model, for the message.
    """
    if adapter.differs_between_ranks and adapter.is_plain:
        num_ranks = adapter.num_ranks * adapter.shard.count
        raise ValueError(
            f"{name} (spread over {num_ranks} ranks) must hold its parameters as DTensors, so that a "
            "checkpoint can name them: call pmoe.parallelize(model, mesh)"
        )


def unwrapped(model: nn.Module, name: str) -> str:
    """Returns a module's or parameter's name without the parts that wrappers add.

    Wrappers are DistributedDataParallel, torch.compile and checkpoint_wrapper.
    """
    (plain_name,) = state_dict._get_fqns(model, name)
    return plain_name


def _parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
    """Yields (optimizer, parameter group, parameter) for each parameter of the optimizers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter


def _owners(metadata: Metadata) -> set[str]:
    """Returns the names of all saved tensors without the part after the last dot.

    For the saved optimizer states, "optimizer.NAME.KEY", the results are the parameters that have a state:
    "optimizer.NAME".

    metadata: the list of the saved tensors that torch.distributed.checkpoint wrote.
    """
    return {name.rpartition(".")[0] for name in metadata.state_dict_metadata}
