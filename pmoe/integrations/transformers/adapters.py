"""`spread_adapters`: PEFT's LoRA trains a model of transformers whose experts are spread over ranks.

PEFT adds adapters after transformers has spread a model. So neither transformers nor PEFT reduces the
gradients of adapters over ranks. And an adapter of experts (``target_parameters``) has factors for all
experts, although a rank holds only some of them:

    experts.gate_up_proj             E_local of E experts        transformers spreads these over ranks
    ParamWrapper.lora_A, lora_B      factors for all E experts   PEFT holds these on every rank

So `spread_adapters` changes the class of PEFT's wrappers to `SpreadParamWrapper`. This class passes the
factors of this rank's experts to the call of the experts. The call adds the product of the factors to the
weights. PEFT still holds all factors on every rank, so it saves and loads adapters as it does on one rank.

Letters: E experts of all ranks, E_local of this rank, R rank of an adapter, I and O dimensions of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from pmoe.arguments import check_module
from pmoe.comm.agreement import gathered
from pmoe.comm.ranks import Ranks
from pmoe.experts.operands import local_part
from pmoe.integrations.transformers.layout import CALL_FACTORS

if find_spec("peft") is None:
    raise ImportError('peft must be installed: pip install "peft>=0.21"')
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer

if not hasattr(ParamWrapper, "get_delta_factors"):
    raise ImportError(
        'peft is too old, its adapters of experts have other parts: pip install -U "peft>=0.21"'
    )

_reduced = WeakTensorKeyDictionary()
"""The parameters whose gradients are reduced already."""


class SpreadParamWrapper(ParamWrapper):
    """PEFT's ParamWrapper (the module with an adapter), for experts that are spread over ranks.

    first_expert: number of this rank's first expert, among the experts of all ranks.
    """

    first_expert: int

    get_delta_factors: Any  # of PEFT, which has no types

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Calls the experts with the adapters in use. torch.compile breaks the graph here."""
        return super().forward(x, *args, **kwargs)

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        """A context in which the experts add the active adapters to their weight.

        PEFT's own method would add them when the context is entered. That is too early, because FSDP2 has not
        gathered the weight yet.
        """
        names = [name for name in active_adapters if name in self.lora_A]
        experts: Any = self.get_base_layer()
        own = slice(self.first_expert, self.first_expert + experts.num_experts)
        factors = [self.get_delta_factors(name) for name in names]
        of_call = vars(experts).setdefault(CALL_FACTORS, {})
        of_call[self.parameter_name] = [(left[own], right[own], scale) for left, right, scale in factors]
        try:
            yield
        finally:
            of_call.pop(self.parameter_name, None)
            if not of_call:
                vars(experts).pop(CALL_FACTORS, None)


def spread_adapters(model: nn.Module) -> nn.Module:
    """Makes PEFT's adapters train a model of transformers over several ranks. Returns the model.

    Call it after ``get_peft_model`` or ``PeftModel.from_pretrained``, and again after an adapter was added.

    - Adapters of experts (``target_parameters``) apply to the experts that this rank holds.
    - All adapters get rank 0's values, because each rank has drawn its own random values.
    - In each backward pass, gradients of adapters are averaged over the batches of all ranks, as FSDP2
      averages gradients of the model.

    The losses and gradients equal those of one rank with all batches. PEFT saves and loads adapters as on one
    rank. If transformers has not spread the model over ranks (``distributed_config``), nothing is changed.

    model: a PeftModel, or a model of transformers with adapters. It is changed.

    Collective: all ranks must call it.

    Raises ValueError if an adapter changes a parameter that transformers has spread in another way than by
    ``ep_implementation="pmoe"``, or if ranks have different adapters.

    Example: model = spread_adapters(get_peft_model(model, LoraConfig(target_parameters=[...])))
    """
    check_module(model=model)
    spread = _spread_model(model)
    if spread is None:
        return model
    layers: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    ]
    for name, layer in layers:
        if isinstance(layer, ParamWrapper):
            _check_wrapper(name, layer, spread)
    own = [(f"{name}.{of}", each) for name, layer in layers for of, each in _parameters_of(layer)]
    _check_same({f"{name} {tuple(parameter.shape)}" for name, parameter in own})
    meshes = spread._mesh_manager
    batches = [meshes.get_mesh(name) for name in ("dp_replicate", "fsdp")]
    groups = [mesh.get_group() for mesh in batches if mesh.size() > 1]
    num_batches = spread.config.distributed_config.dp_size
    for _, layer in layers:
        is_of_experts = isinstance(layer, ParamWrapper)
        if is_of_experts:
            layer.__class__ = SpreadParamWrapper
            experts = layer.get_base_layer()
            layer.first_expert = meshes.get_mesh("ep").get_local_rank() * experts.num_experts
        for _, parameter in _parameters_of(layer):
            # In an adapter of experts, a rank has gradients of its own experts, for the tokens of all ranks,
            # and zeros for other experts. So the sum over all ranks is complete. Other adapters have the
            # gradients of this rank's batch.
            _share(parameter, [dist.group.WORLD] if is_of_experts else groups, num_batches)
    return model


def _spread_model(model: nn.Module) -> Any:
    """Returns the part of ``model`` that transformers has spread over ranks; None if there is none."""
    for module in model.modules():
        if getattr(module, "_mesh_manager", None) is not None and not isinstance(module, BaseTunerLayer):
            return module
    return None


def _parameters_of(layer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters of all adapters of a layer with their names.

    layer: a BaseTunerLayer of PEFT. Example of a name: lora_A.default.weight.
    """
    for kind in layer.adapter_layer_names:
        adapters = getattr(layer, kind, None)
        if isinstance(adapters, nn.Module):
            yield from adapters.named_parameters(prefix=kind)


def _check_wrapper(name: str, wrapper: Any, spread: Any) -> None:
    """Raises ValueError if an adapter is for a parameter that is not a weight of experts that pmoe runs.

    name: the name of the wrapper in the model.
    wrapper: PEFT's ParamWrapper, the module with the adapter.
    spread: the model of transformers that is spread over ranks.
    """
    experts = wrapper.get_base_layer()
    ours = getattr(spread.config.distributed_config, "ep_implementation", None) == "pmoe"
    if getattr(experts, "_is_expert_parallel", False) and ours and wrapper.get_param().dim() == 3:
        return
    raise ValueError(
        f"target_parameters (with {wrapper.parameter_name} of {name}, a {type(experts).__name__}) must be "
        f"stacked weights of experts that pmoe spreads over ranks: from_pretrained(..., "
        'distributed_config=DistributedConfig(..., ep_size=N, ep_implementation="pmoe")); adapt other '
        "parameters by target_modules"
    )


def _check_same(adapters: set[str]) -> None:
    """Raises ValueError on every rank if ranks have different adapters. Collective.

    adapters: names and shapes of this rank's adapters.
    """
    of_ranks = gathered(Ranks(dist.group.WORLD), adapters, stage="comparing PEFT's adapters")
    for rank, others in enumerate(of_ranks):
        if others != of_ranks[0]:
            only = [min(own, default="none") for own in (of_ranks[0] - others, others - of_ranks[0])]
            raise ValueError(
                f"PEFT's adapters must be the same on every rank: only rank 0 has {only[0]}, only rank "
                f"{rank} has {only[1]}"
            )


def _share(parameter: nn.Parameter, groups: Sequence[Any], num_batches: int) -> None:
    """Gives a parameter the first rank's value, and reduces its gradients from now on. Collective.

    parameter: a parameter of any shape. With tensor parallelism it may be a DTensor, which is split over
        ranks.
    groups: process groups. Gradients are summed over the first group, then over the next, and so on. The
        ranks of a group hold the same part of the parameter.
    num_batches: the number by which the sum is divided.
    """
    holders = groups if isinstance(parameter, DTensor) else [dist.group.WORLD]
    for group in holders:
        dist.broadcast(local_part(parameter.detach()), group=group, group_src=0)
    if not groups or parameter in _reduced:
        return
    _reduced[parameter] = True

    def reduce(gradient: Tensor) -> Tensor:
        local = local_part(gradient).clone(memory_format=torch.contiguous_format)
        for group in groups:
            dist.all_reduce(local, group=group)
        local /= num_batches
        if not isinstance(gradient, DTensor):
            return local
        mesh = gradient.device_mesh
        return DTensor.from_local(
            local, mesh, gradient.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )

    # An adapter that is not in use is frozen, and torch refuses hooks of frozen tensors.
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(reduce)
    parameter.requires_grad_(is_trained)
