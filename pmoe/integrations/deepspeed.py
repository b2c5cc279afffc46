"""pmoe's layers under DeepSpeed's ZeRO stages 0, 1 and 2, with DeepSpeed's groups and checkpoints.

DeepSpeed averages most gradients over all ranks, but an expert's gradients only over the ranks with this
expert. It recognises experts by the attributes `allreduce = False` and `group_name` of their parameters, in
models that contain its own class `MoE`. So `initialize` puts a module of that class, without parameters, into
each layer:

    layer                 MoELayer, built with group=deepspeed.group(ep_size)
      gate, experts       as without DeepSpeed; experts get group_name = "ep_size_N"
      deepspeed           `Marker`, a deepspeed.moe.layer.MoE: numbers and names of the experts

In DeepSpeed's checkpoints each expert has a file of its own. So the weights of experts can be loaded even if
the experts are now spread over another number of ranks. Optimizer states can be loaded only if experts are
spread over as many ranks as before, and with ZeRO only on the same number of ranks.

Stage 3 is refused, because DeepSpeed accepts no module of the class MoE there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pmoe.arguments import check_count, check_module
from pmoe.comm.agreement import all_fail_together, check_same
from pmoe.comm.ranks import Ranks
from pmoe.experts.lora import Adapter
from pmoe.experts.marks import is_expert
from pmoe.experts.modules import ModuleExperts
from pmoe.integrations.model_layers import check_not_wrapped
from pmoe.layer import MoELayer
from pmoe.measure.store import load_json
from pmoe.training.clipping import clip_grad_norm_
from pmoe.warn import warn_of_other_release

try:
    import deepspeed
    from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import groups
except ImportError as error:
    raise ImportError(
        f"deepspeed must be installed: pip install deepspeed==0.19.8. On a machine without a GPU, set the "
        f"environment variable DS_ACCELERATOR=cpu ({error})"
    ) from error

TESTED = "0.19"
"""The release of DeepSpeed with which this module was tested."""

EXPERTS = "deepspeed_moe.experts.deepspeed_experts"
"""The name that DeepSpeed gives to the experts of a layer, inside of the layer."""

MARKER = "deepspeed"
"""Name of the `Marker` in a `MoELayer`."""

WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule, deepspeed.DeepSpeedEngine)
"""Wrappers that must not be around a model that DeepSpeed gets, or around a part of it."""

EP_SIZES = "pmoe_ep_sizes"
"""Entry of DeepSpeed's checkpoints with the number of ranks over which each layer's experts are spread."""

COMPARED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
)
"""Entries of DeepSpeed's configuration that must be the same on all ranks, beside ZeRO's stage.

They decide which collectives a step has, so ranks with different values would wait for each other.
"""

__all__ = ["Marker", "group", "initialize", "mark", "trained_groups"]


def group(ep_size: int) -> dist.ProcessGroup:
    """Returns DeepSpeed's group of ranks over which experts are spread, for MoELayer's argument ``group``.

    Collective, after ``deepspeed.init_distributed``. A second call returns the same group.

    ep_size: number of ranks over which experts are spread; it must divide the number of all ranks.

    Raises RuntimeError if there is no process group. Raises ValueError or TypeError on all ranks if the
    number of any rank is wrong, or if the numbers of ranks differ.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "deepspeed.init_distributed() must be called before pmoe.integrations.deepspeed.group"
        )
    ranks = Ranks()
    with all_fail_together(ranks, stage="checking ep_size for DeepSpeed"):
        check_count(ep_size=ep_size)
        if ranks.size % ep_size:
            raise ValueError(f"ep_size ({ep_size}) must divide the number of ranks ({ranks.size})")
    _check_same(ranks, {"ep_size": ep_size})
    name = _name(ep_size)
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep_size)
    own: dist.ProcessGroup = groups._get_expert_parallel_group(name)
    return own


def initialize(
    model: nn.Module, config: Mapping[str, Any] | str | os.PathLike[str], **arguments: Any
) -> tuple[Any, Any, Any, Any]:
    """Calls ``deepspeed.initialize`` for a model with MoE layers.

    model: its MoE layers must be built with ``group=group(ep_size)``, and `pmoe.parallelize` must not have
        changed them.
    config: DeepSpeed's configuration, as a mapping or as the path of a JSON file.
    arguments: further arguments of ``deepspeed.initialize``. If you pass an ``optimizer`` of your own, make
        it of `trained_groups`.

    Returns what ``deepspeed.initialize`` returns: (engine, optimizer, data loader, scheduler).

    Without ZeRO and in float32, DeepSpeed would clip gradients by the mean of the ranks' norms, as if all
    ranks had the same experts. In this case the engine clips by `pmoe.clip_grad_norm_` instead.

    The engine's ``load_checkpoint`` raises ValueError if optimizer states were saved for experts that are
    spread over another number of ranks.

    Collective. Raises what `mark` raises. Raises ValueError or TypeError on all ranks if the configuration of
    any rank is wrong or has ZeRO's stage 3, if an optimizer has no groups of experts' parameters, if ZeRO
    would have nothing to train in the experts, if ranks have different values of the stage or of an entry in
    `COMPARED`, or if ranks train different parameters.
    """
    ranks = Ranks()
    with all_fail_together(ranks, stage="checking the configuration for DeepSpeed"):
        entries = _entries(config)
        stage = zero_stage(entries)
    compared = {f"config's {name}": entries.get(name) for name in COMPARED}
    _check_same(ranks, {"config's zero_optimization (stage)": stage, **compared})
    mark(model)
    is_trained = {f"{name}'s requires_grad": each.requires_grad for name, each in model.named_parameters()}
    _check_same(ranks, is_trained, "Freeze the same parameters on all ranks")
    if stage > 0:
        _check_trains_experts(model, stage)
        with all_fail_together(ranks, stage="checking an optimizer for DeepSpeed"):
            _check_optimizer(arguments.get("optimizer"))
        has_optimizer = isinstance(arguments.get("optimizer"), torch.optim.Optimizer)
        if not has_optimizer and arguments.get("model_parameters") is None:
            arguments["model_parameters"] = trained_groups(model)
    made = deepspeed.initialize(model=model, config=config, **arguments)
    engine = made[0]
    if stage == 0:
        engine.clip_fp32_gradients = lambda: clip_grad_norm_(engine.module, engine.gradient_clipping())
    _load_own_frozen_experts(engine)
    _save_trained_experts(engine)
    _refuse_states_of_other_ranks(engine, stage)
    return made  # type: ignore[no-any-return]


def trained_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the trained parameters of a model in groups, for an optimizer of your own under ZeRO 1 or 2.

    Parameters of experts are in groups of their own, as DeepSpeed needs it. Frozen parameters are in no
    group, because ZeRO fails if a group has no trained one.

    model: a model that `mark` takes. It is marked.

    Collective. Raises what `mark` raises.

    Example: optimizer = torch.optim.AdamW(trained_groups(model), lr=1e-4)
    """
    mark(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "dense-params"})
    return [options for options in made if options["params"]]


def mark(model: nn.Module) -> None:
    """Marks the experts of a model for DeepSpeed. `initialize` does it; a second call changes nothing.

    model: a model whose MoE layers were built with ``group=group(ep_size)``, and which `pmoe.parallelize` has
        not changed.

    Collective. Raises ValueError or TypeError on all ranks in these cases:

    - The model of any rank has no MoE layer, or a wrapper such as DistributedDataParallel is around it.
    - DeepSpeed cannot reduce the gradients of a layer's experts, for example because the layer was built with
      another group.
    - The models of ranks have different layers, or a layer's experts are spread over different numbers of
      ranks.
    """
    ranks = Ranks()
    with all_fail_together(ranks, stage="checking a model for DeepSpeed"):
        layers = _checked_layers(model)
    _check_same(ranks, {f"{name or 'model'}'s ep_size": layer.ranks.size for name, layer in layers.items()})
    for layer in layers.values():
        for parameter in layer.experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = _name(layer.ranks.size)  # type: ignore[attr-defined]
        if MARKER not in layer._modules:
            layer.add_module(MARKER, Marker(layer))
            layer.register_load_state_dict_pre_hook(_take_experts)  # type: ignore[no-untyped-call]


class Marker(MoE):  # type: ignore[misc]
    """A module by which DeepSpeed recognises a layer with experts. It has their number, names and group.

    It has no parameters and is never called.

    layer: the layer that contains it.
    excludes_frozen: whether `state_dict` leaves out frozen parameters of experts.
    """

    def __init__(self, layer: MoELayer) -> None:
        nn.Module.__init__(self)
        self._layer = (layer,)  # in a tuple, because a module would become a child of this one
        self.num_experts = layer.num_experts
        self.ep_size = layer.ranks.size
        self.num_local_experts = self.num_experts // self.ep_size
        self.expert_group_name = _name(self.ep_size)
        self.excludes_frozen = False

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Checks the order of ranks. DeepSpeed calls this method when it makes an engine.

        DeepSpeed's own method would also create groups of ranks. Here the groups exist already.

        use_data_before_expert_parallel_: DeepSpeed's setting of that name.

        Raises ValueError if the setting is True. DeepSpeed would then spread experts over ranks that are not
        consecutive, but `group` has made groups of consecutive ranks.
        """
        if use_data_before_expert_parallel_:
            raise ValueError(
                "use_data_before_expert_parallelism (True) must be False in DeepSpeed's configuration: the "
                "ranks of pmoe.integrations.deepspeed.group are consecutive"
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's experts, each tensor under a name of its own, when DeepSpeed saves experts.

        To save experts, DeepSpeed calls this method without arguments. With arguments, the method is called
        for the state dict of a whole model, and returns nothing, because the MoE layer adds the same tensors.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        tensors = _tensors_of(self._layer[0])
        trained = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        }
        # DeepSpeed expects a file for each expert. If all parameters of a layer are frozen, none can be left
        # out, because there would be no files.
        if self.excludes_frozen and any(tensor.requires_grad for tensor in tensors.values()):
            tensors = trained
        return {
            f"{EXPERTS}.{expert}.{name}": tensor.detach()[expert]
            for name, tensor in tensors.items()
            for expert in range(self.num_local_experts)
        }

    def forward(self, *_: object) -> None:
        """Raises RuntimeError, because the layer must be called, not this module in it."""
        raise RuntimeError("pmoe.integrations.deepspeed.Marker must not be called: call the layer around it")


# ---- DeepSpeed's checkpoints


def _tensors_of(layer: MoELayer) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a layer's experts that a state dict has, by name.

    Index i of their dimension 0 is this rank's expert i (`_check_layer`).
    """
    state = layer.experts.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def _take_experts(layer: MoELayer, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Loads experts that DeepSpeed has read from their files. This is a hook of ``load_state_dict()``.

    A checkpoint of DeepSpeed has rank 0's state dict and a file for each expert. To load it, DeepSpeed adds
    this rank's experts, numbered from 0, to rank 0's state dict. The hook moves the values of these entries
    into the layer's entries, which held the experts of rank 0 before.

    layer: the layer that loads its state.
    state: the state dict, which is changed.
    prefix: the name of the layer in the model, with a dot at the end.
    """
    pattern = re.compile(re.escape(f"{prefix}{MARKER}.{EXPERTS}.") + r"(\d+)\.(.+)")
    found = {key: match for key in state if (match := pattern.fullmatch(key)) is not None}
    tensors = _tensors_of(layer)
    for key, match in found.items():
        expert, name = int(match[1]), match[2]
        value = state.pop(key)
        if name not in tensors or tensors[name][expert].shape != value.shape:
            raise ValueError(
                f"{key} (of shape {tuple(value.shape)}) must be one of the experts' "
                f"{', '.join(sorted(tensors))}: the checkpoint is of a layer with other options. Build "
                "the layer as it was when it was saved"
            )
        tensors[name][expert].copy_(value)
    for name in {match[2] for match in found.values()}:
        state[f"{prefix}experts.{name}"] = tensors[name].detach()
    for name, adapter in layer.experts.named_modules() if found else ():
        key = f"{prefix}experts.{name}._extra_state"
        if isinstance(adapter, Adapter) and key in state:
            # The adapter's extra state names the experts to which its matrices belong. It still names those
            # of rank 0, although the matrices have been replaced above by those of this rank's experts.
            state[key] = {**state[key], "experts": adapter.get_extra_state()["experts"]}


def _load_own_frozen_experts(engine: Any) -> None:
    """Makes an engine load frozen experts from the files of these experts only.

    A checkpoint of ZeRO 2 also has all frozen parameters of rank 0, and DeepSpeed copies them into the
    parameters of every rank after `_take_experts` has loaded the rank's own experts.

    engine: DeepSpeed's engine.
    """
    load = engine.load_module_state_dict

    def load_module_state_dict(checkpoint: Mapping[str, Any], *args: Any, **options: Any) -> None:
        saved = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        if saved is not None:
            layers = [module for module in engine.module.modules() if isinstance(module, MoELayer)]
            experts = [parameter for layer in layers for parameter in layer.experts.parameters()]
            # With these entries DeepSpeed copies each parameter of an expert into itself, so nothing changes.
            own = {engine.param_names[parameter]: parameter for parameter in experts}
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: {**saved, **own}}
        load(checkpoint, *args, **options)

    engine.load_module_state_dict = load_module_state_dict


def _save_trained_experts(engine: Any) -> None:
    """Makes an engine leave frozen experts out of a checkpoint if it leaves out frozen parameters.

    With ``exclude_frozen_parameters=True``, DeepSpeed leaves frozen parameters out of rank 0's state dict,
    but not out of the files of experts.

    engine: DeepSpeed's engine.
    """
    save = engine._save_moe_checkpoint

    def save_moe_checkpoint(*args: Any, exclude_frozen_parameters: bool = False, **options: Any) -> None:
        markers = [module for module in engine.module.modules() if isinstance(module, Marker)]
        try:
            for marker in markers:
                marker.excludes_frozen = exclude_frozen_parameters
            save(*args, exclude_frozen_parameters=exclude_frozen_parameters, **options)
        finally:
            for marker in markers:
                marker.excludes_frozen = False

    engine._save_moe_checkpoint = save_moe_checkpoint


def _refuse_states_of_other_ranks(engine: Any, stage: int) -> None:
    """Makes an engine refuse optimizer states that belong to experts of other ranks.

    DeepSpeed saves one file of optimizer states for each rank. If experts are spread over another number of
    the same ranks, ZeRO would give each rank the states of other experts.

    engine: DeepSpeed's engine.
    stage: ZeRO's stage, 0 to 2.
    """
    save = engine._save_moe_checkpoint
    load = engine._load_checkpoint
    load_module = engine.load_module_state_dict
    wants_states = False  # only while `load_checkpoint` runs

    def ep_sizes() -> dict[str, int]:
        layers = engine.module.named_modules()
        return {name: layer.ranks.size for name, layer in layers if isinstance(layer, MoELayer)}

    def save_moe_checkpoint(
        *args: Any, client_state: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        save(*args, client_state={**(client_state or {}), EP_SIZES: ep_sizes()}, **options)

    def load_checkpoint(
        *args: Any, load_optimizer_states: bool = True, load_module_only: bool = False, **options: Any
    ) -> Any:
        nonlocal wants_states
        wants_states = load_optimizer_states and not load_module_only
        wanted = {"load_optimizer_states": load_optimizer_states, "load_module_only": load_module_only}
        try:
            return load(*args, **wanted, **options)
        finally:
            wants_states = False

    def load_module_state_dict(checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
        # The entry is taken out, because DeepSpeed returns entries that it does not know as the user's.
        saved = checkpoint.pop(EP_SIZES, {})
        if wants_states:
            _check_same_ranks(saved, ep_sizes())
            num_ranks = checkpoint["dp_world_size"]
            if stage > 0 and num_ranks != engine.dp_world_size:
                raise ValueError(
                    f"checkpoint (of {num_ranks} ranks) must be loaded on as many ranks, not on "
                    f"{engine.dp_world_size}, because each rank's optimizer states are in a file of that "
                    f"rank: continue on {num_ranks} ranks, {WEIGHTS_ALONE}"
                )
        load_module(checkpoint, *args, **options)

    engine._save_moe_checkpoint = save_moe_checkpoint
    engine._load_checkpoint = load_checkpoint
    engine.load_module_state_dict = load_module_state_dict


WEIGHTS_ALONE = "or load the weights alone (load_module_only=True), with new optimizer states"
"""The end of errors about optimizer states of other ranks. It says what to do."""


def _check_same_ranks(saved: Mapping[str, int], own: Mapping[str, int]) -> None:
    """Raises ValueError if a layer's experts were spread over another number of ranks when they were saved.

    saved: for each layer's name in the checkpoint, the number of ranks over which its experts were spread.
    own: the same for the layers of the model.
    """
    for name, size in saved.items():
        if name in own and own[name] != size:
            raise ValueError(
                f"checkpoint (experts of {name or 'model'} over {size} ranks) must be loaded with experts "
                f"over as many ranks, not over {own[name]}, because each rank's optimizer states are in a "
                f"file of that rank: build the layer with group(ep_size={size}), {WEIGHTS_ALONE}"
            )


# ---- checks


def _name(ep_size: int) -> str:
    """Returns the name of DeepSpeed's groups for experts that are spread over ``ep_size`` ranks."""
    return f"ep_size_{ep_size}"


def _entries(config: object) -> Mapping[str, Any]:
    """Returns a configuration of DeepSpeed as a mapping.

    config: the configuration, or the path of its JSON file.

    Raises TypeError if it is neither, and ValueError or OSError if the file cannot be read.
    """
    if isinstance(config, str | os.PathLike):
        config = load_json(Path(config), dict, "it holds DeepSpeed's configuration")
    if not isinstance(config, Mapping):
        raise TypeError(f"config ({type(config).__name__}) must be a mapping or the path of a JSON file")
    return config


def zero_stage(entries: Mapping[str, Any]) -> int:
    """Returns ZeRO's stage in a configuration of DeepSpeed, 0 to 2.

    entries: the configuration.

    Raises ValueError for stage 3.
    """
    stage = int(dict(entries.get("zero_optimization") or {}).get("stage", 0))
    if stage == 3:
        raise ValueError(
            "zero_optimization (stage 3) must be 0, 1 or 2: DeepSpeed takes only its own layers in "
            "stage 3. Use stage 2, or FSDP2 by pmoe.parallelize and fully_shard"
        )
    return stage


def _check_optimizer(optimizer: object) -> None:
    """Raises ValueError if ZeRO cannot tell which parameters of a user's optimizer are those of experts.

    optimizer: the user's optimizer. None, or a function that makes one from parameters, is not checked:
        DeepSpeed passes `trained_groups` to it.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and not any(
        options.get("moe") for options in optimizer.param_groups
    ):
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) must have the parameters of experts in groups of their "
            "own: make it of pmoe.integrations.deepspeed.trained_groups(model), or leave it out and let "
            "the configuration name one"
        )


def _check_trains_experts(model: nn.Module, stage: int) -> None:
    """Raises ValueError if all experts of a model are frozen. ZeRO then refuses a model with the class MoE.

    model: the model, after `mark`.
    stage: ZeRO's stage, 1 or 2, for the message.
    """
    if not any(is_expert(parameter) for parameter in model.parameters() if parameter.requires_grad):
        raise ValueError(
            f"model ({type(model).__name__}) must train at least one parameter of its experts with ZeRO "
            f"{stage}, because DeepSpeed expects groups of experts there: leave zero_optimization out, which "
            "is stage 0"
        )


def _check_same(
    ranks: Ranks, values: Mapping[str, object], cure: str = "Pass the same arguments on all ranks"
) -> None:
    """Raises ValueError on all ranks if arguments of this module differ between ranks. Collective.

    ranks: all ranks.
    values: this rank's values by the names that errors show.
    cure: what to do, as the end of the error's text.
    """
    check_same(ranks, values, stage="comparing arguments for DeepSpeed", cure=cure)


def _checked_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers of a model by name, after `_check_layer` for each.

    Raises TypeError if the model is no module, ValueError if it has no layer or is in a wrapper.
    """
    check_module(model=model)
    warn_of_other_release("deepspeed", str(deepspeed.__version__), TESTED)
    check_not_wrapped(model, WRAPPERS, "DeepSpeed distributes the model itself. Pass the module inside")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MoELayer)}
    if not layers:
        raise ValueError(
            f"model ({type(model).__name__}) must contain a pmoe.MoELayer; without one, call "
            "deepspeed.initialize"
        )
    for name, layer in layers.items():
        _check_layer(name, layer)
    return layers


def _check_layer(name: str, layer: MoELayer) -> None:
    """Raises ValueError if DeepSpeed cannot reduce the gradients of this layer's experts.

    name: the layer's name in the model, for the message.
    """
    where = name or "model"
    experts = layer.layer_modules.experts
    advice = "build it with group=pmoe.integrations.deepspeed.group(ep_size)"
    if experts.is_parallelized:
        raise ValueError(
            f"{where} must not be changed by pmoe.parallelize, whose DTensors DeepSpeed cannot move or "
            f"partition: {advice}"
        )
    if layer.grid.esp.size > 1:
        raise ValueError(
            f"{where} (hidden columns split over {layer.grid.esp.size} ranks) must have whole "
            f"experts: {advice}"
        )
    if isinstance(experts, ModuleExperts):
        raise ValueError(
            f"{where} (experts that are modules) must have stacked experts, such as expert='ffn'"
        )
    if experts.replicated_dims:
        raise ValueError(
            f"{where} (an adapter that all experts share) must have an adapter for each expert, because "
            "DeepSpeed saves experts one by one: call pmoe.add_lora(..., shared=False)"
        )
    for own_name, tensor in _tensors_of(layer).items():
        if tensor.shape[:1] != (layer.num_local_experts,):
            raise ValueError(
                f"{where} (experts' {own_name} of shape {tuple(tensor.shape)}) must have parameters and "
                f"buffers of experts that count this rank's {layer.num_local_experts} experts in dimension "
                "0, because DeepSpeed saves experts one by one"
            )
    known = groups._get_expert_parallel_group_dict().get(_name(layer.ranks.size))
    members = None if known is None else dist.get_process_group_ranks(known)
    own = list(range(dist.get_world_size()))[dist.get_rank() : dist.get_rank() + 1]
    if layer.ranks.group is not None:
        own = dist.get_process_group_ranks(layer.ranks.group)
    if members != own:
        raise ValueError(
            f"{where} (experts over ranks {own}) must have DeepSpeed's ranks for ep_size {layer.ranks.size}, "
            f"{members or 'which were not made yet'}: {advice}"
        )
