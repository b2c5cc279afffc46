"""Reads an experts module of transformers as experts that a MoELayer can run.

The weights are the module's own parameters, not copies, and the activation is the module's own function:

    up_proj, or gate_up_proj   w1    (E, G, M), or (E, M, G) if is_transposed
    down_proj                  w2    (E, M, H), or (E, H, M) if is_transposed
    *_bias                     b1, b2
    post_expert_norm           norm

Modules with another layout are refused.

Letters: E experts of this rank, M model width, H intermediate width, G = H, or 2H if the module has a gate
projection.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import GELUActivation, SiLUActivation
from transformers.integrations import moe

from pmoe.experts import borrowed

FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
"""Flags that transformers sets on experts modules, with the values to assume if a release does not.

is_concatenated says whether the columns of the gate and up projections are concatenated or interleaved. pmoe
does not need it, because the module's own ``_apply_gate`` separates them.
"""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Allowed dtypes of weights. Any other dtype means that the weights are quantised."""

ADVICE = 'use experts_implementation="grouped_mm" (or "eager") for this model'

CALL_FACTORS = "_pmoe_factors"
"""The attribute of an experts module with the factors of PEFT's adapters, during a call.

It is a dict from the name of a weight to a list of (left, right, scale), the factors of this rank's experts.
The weight is then weight + scale * left @ right. `pmoe.integrations.transformers.adapters` sets it.
"""


def borrow(module: nn.Module) -> borrowed.BorrowedExperts | borrowed.NormedExperts:
    """Returns a module's experts as an `Experts` object for one call of a MoELayer. Nothing is copied.

    module: an experts module of transformers.

    Raises ValueError if pmoe does not know the layout of the module's weights.
    """
    check(module)
    up = _up_name(module)
    has_bias = _flag(module, "has_bias")
    kind, activation = _activation(module)
    stacks = borrowed.Stacks(
        w1=_adapted(module, up),
        w2=_adapted(module, "down_proj"),
        b1=_tensor(module, f"{up}_bias") if has_bias else None,
        b2=_tensor(module, "down_proj_bias") if has_bias else None,
        transposed=_flag(module, "is_transposed"),
        activation=activation,
        norm=module._modules.get("post_expert_norm"),
    )
    _check_shapes(module, stacks)
    check_same_place(module)
    return kind(stacks)


def check(module: nn.Module) -> None:
    """Raises ValueError if pmoe cannot run an experts module. Its weights need not be loaded yet.

    The function checks the module's class and flags, and the names, dtypes and dimensions of its parameters.

    module: an experts module of transformers.
    """
    name = type(module).__name__
    if not hasattr(module, "has_bias"):
        raise ValueError(
            f"experts module ({name}) must be of a class decorated with @use_experts_implementation, which "
            f"says how its weights lie; otherwise {ADVICE}"
        )
    flags = inspect.signature(moe.use_experts_implementation).parameters  # of this release
    unknown = [
        f"{flag}={getattr(module, flag)!r}"
        for flag, parameter in flags.items()
        if flag.startswith(("has_", "is_")) and flag not in FLAGS
        if getattr(module, flag, parameter.default) != parameter.default
    ]
    if unknown:
        raise ValueError(
            f"experts module ({name}, {', '.join(unknown)}) must only have flags that pmoe knows: {ADVICE}"
        )
    expected = _expected(module)
    tensor_names = {
        key for key, tensor in [*module._parameters.items(), *module._buffers.items()] if tensor is not None
    }
    missing = [key for key in expected if not hasattr(module, key)]
    if missing or tensor_names - expected:
        raise ValueError(
            f"experts module ({name}) must hold {', '.join(sorted(expected))} and nothing else; it holds "
            f"{', '.join(sorted(tensor_names))}. If weights are quantised, load the model without "
            f"quantization_config (or with dequantize=True), or {ADVICE}"
        )
    for key in sorted(tensor_names):
        tensor = getattr(module, key)
        if tensor.dtype not in DTYPES or tensor.dim() != (2 if key.endswith("_bias") else 3):
            raise ValueError(
                f"{key} of experts module ({name}) is {tensor.dtype} of shape {tuple(tensor.shape)}; it "
                f"must be floating-point type and stacked by expert. If it is quantised, load the model "
                f"dequantised, or {ADVICE}"
            )
    owners = {key: key.split(".")[0] for key, _ in module.named_parameters() if "." in key}
    learned = [key for key, of in owners.items() if of not in ("post_expert_norm", "parametrizations")]
    if learned:
        raise ValueError(
            f"the activation of experts module ({name}) must have no parameters ({learned}): {ADVICE}"
        )


def _flag(module: nn.Module, name: str) -> bool:
    """Returns the module's attribute ``name``, one of `FLAGS`, or the default in `FLAGS` if it has none."""
    return bool(getattr(module, name, FLAGS[name]))


def _up_name(module: nn.Module) -> str:
    """Returns the name of the parameter of the first linear layer of the experts.

    It is "gate_up_proj" if the experts have a gate projection, else "up_proj".
    """
    return "gate_up_proj" if _flag(module, "has_gate") else "up_proj"


def _expected(module: nn.Module) -> set[str]:
    """Returns the names of the parameters that a module must have, given its flags has_gate and has_bias."""
    names = {_up_name(module), "down_proj"}
    return names | {f"{name}_bias" for name in names} if _flag(module, "has_bias") else names


def _tensor(module: nn.Module, name: str) -> Tensor:
    """Returns a parameter of the module, of any shape, by its name.

    Raises ValueError if it is a DTensor.
    """
    tensor: Tensor = getattr(module, name)
    if hasattr(tensor, "to_local"):
        raise ValueError(
            f"{name} of experts module ({type(module).__name__}) is a DTensor; experts must be given this "
            "rank's part of it: load the model with "
            'DistributedConfig(ep_size=N, ep_implementation="pmoe")'
        )
    return tensor


def _adapted(module: nn.Module, name: str) -> Tensor:
    """Returns a weight of the module, plus the values that adapters add to it in this call.

    The shape is (E, out, in) or (E, in, out), for E experts.

    Raises ValueError if it is a DTensor.
    """
    weight = _tensor(module, name)
    for left, right, scale in vars(module).get(CALL_FACTORS, {}).get(name, ()):
        with torch.autocast(weight.device.type, enabled=False):  # which would change the type of the weight
            weight = torch.baddbmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=scale)
    return weight


def _check_shapes(module: nn.Module, stacks: borrowed.Stacks) -> None:
    """Raises ValueError if the shapes of w1 and w2 do not fit together.

    Both must have the same number of experts and the same model width. If w2 takes H input features, w1 must
    have H output features, or 2H if the module has a gate projection.

    stacks: the weights of the module.
    """
    w1, w2 = map(stacks.out_features_first, (stacks.w1, stacks.w2))
    experts, d_model, hidden = w2.shape
    shape = (experts, hidden * (2 if _flag(module, "has_gate") else 1), d_model)
    if tuple(w1.shape) != shape:
        raise ValueError(
            f"{_up_name(module)} of experts module ({type(module).__name__}) is of shape "
            f"{tuple(stacks.w1.shape)}; beside a down_proj of {tuple(stacks.w2.shape)} it must be "
            f"{(shape[0], shape[2], shape[1]) if stacks.transposed else shape}: {ADVICE}"
        )


def check_same_place(module: nn.Module, **inputs: Tensor) -> None:
    """Raises ValueError if tensors differ in device or dtype from the module's first weight.

    module: an experts module of transformers.
    inputs: the tensors to check, of any shape, by name. If none is passed, the module's own parameters are
        checked, and refused if they are on the meta device.

    Under autocast dtypes may differ.
    """
    name = type(module).__name__
    first_name = _up_name(module)
    first_weight = _tensor(module, first_name)
    for key, tensor in (inputs or {key: _tensor(module, key) for key in sorted(_expected(module))}).items():
        if tensor.is_meta and not inputs:
            raise ValueError(
                f"{key} of experts module ({name}) is on the meta device; it must hold values: load weights, "
                "by from_pretrained or load_state_dict(..., assign=True), before the model is called"
            )
        if tensor.device != first_weight.device:
            raise ValueError(
                f"{key} of experts module ({name}) is on {tensor.device}; it must be where {first_name} is: "
                f'model.to("{first_weight.device}")'
            )
        if tensor.dtype != first_weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
            raise ValueError(
                f"{key} of experts module ({name}) is {tensor.dtype}; it must be of the type of "
                f"{first_name}: model.to({first_weight.dtype}), or call the model under autocast"
            )


def _activation(
    module: Any,
) -> tuple[type[borrowed.BorrowedExperts | borrowed.NormedExperts], Any]:
    """Returns the class of pmoe that computes a module's experts, and the experts' activation.

    The class computes with the module's own weights. It is `NormedExperts` if the module normalizes the
    experts' results.

    module: the experts of a transformers model.

    The activation is the name of a nonlinearity for which pmoe has kernels ("silu", "relu", "gelu",
    "swiglu"). Otherwise it is the module's own function, which autograd differentiates.
    """
    function = getattr(module, "act_fn", None)
    name = _name_of(function)
    if _flag(module, "has_gate"):
        function = module._apply_gate
        gating = getattr(function, "__func__", None)
        is_usual = gating is not None and gating is getattr(moe, "_default_apply_gate", None)
        name = "swiglu" if is_usual and name == "silu" else None
    if _flag(module, "has_post_expert_norm"):
        return borrowed.NormedExperts, function
    if name is None:
        return borrowed.BorrowedActivation, function
    return (borrowed.BorrowedSwiGLU if name == "swiglu" else borrowed.BorrowedFFN), name


def _name_of(activation: object) -> str | None:
    """Returns the name that pmoe has for an activation function; None if pmoe has no kernels for it."""
    if activation is F.silu or isinstance(activation, nn.SiLU | SiLUActivation):
        return "silu"
    if activation is F.relu or isinstance(activation, nn.ReLU):
        return "relu"
    exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
    if exact or (isinstance(activation, GELUActivation) and activation.act is F.gelu):
        return "gelu"
    return None
