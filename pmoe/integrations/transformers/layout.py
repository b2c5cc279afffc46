"""What an experts module of transformers holds, as pmoe's experts: views of its own parameters, its own
activation, and nothing that pmoe does not know.

Letters: E experts of this rank, M model width, I intermediate width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import GELUActivation, SiLUActivation
from transformers.integrations import moe

from pmoe.integrations.transformers import borrowed

FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}
"""Of transformers' registry, with the value that holds where a release does not have them yet. How gate and
up columns are mixed (is_concatenated) is the business of the module's own ``_apply_gate``."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

ADVICE = 'use experts_implementation="grouped_mm" (or "eager") for this model'


def borrow(module: nn.Module) -> borrowed.BorrowedExperts | borrowed.NormedExperts:
    """This module's experts, for one call. Raises ValueError where pmoe does not know how its weights lie."""
    check(module)
    up, has_bias = _up_name(module), _flag(module, "has_bias")
    kind, activation = _activation(module)
    stacks = borrowed.Stacks(
        w1=_tensor(module, up),
        w2=_tensor(module, "down_proj"),
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
    """What of `borrow` can be said before there are weights."""
    name = type(module).__name__
    if not hasattr(module, "has_bias"):
        raise ValueError(
            f"experts module ({name}) must be of a class under @use_experts_implementation, which says how "
            f"its weights lie: {ADVICE}"
        )
    flags = inspect.signature(moe.use_experts_implementation).parameters  # of this release
    unknown = [
        f"{flag}={getattr(module, flag)!r}"
        for flag, each in flags.items()
        if flag.startswith(("has_", "is_")) and flag not in FLAGS
        if getattr(module, flag, each.default) != each.default
    ]
    if unknown:
        raise ValueError(
            f"experts module ({name}, {', '.join(unknown)}) must have only flags that pmoe knows: {ADVICE}"
        )
    expected = _expected(module)
    held = {key for key, each in [*module._parameters.items(), *module._buffers.items()] if each is not None}
    absent = [key for key in expected if not hasattr(module, key)]
    if absent or held - expected:
        raise ValueError(
            f"experts module ({name}) must hold {', '.join(sorted(expected))} and nothing else; it holds "
            f"{', '.join(sorted(held))}. Where weights are quantised, load the model without "
            f"quantization_config (or with dequantize=True), or {ADVICE}"
        )
    for key in sorted(held):
        each = getattr(module, key)
        if each.dtype not in DTYPES or each.dim() != (2 if key.endswith("_bias") else 3):
            raise ValueError(
                f"{key} of experts module ({name}) is {each.dtype} of shape {tuple(each.shape)}; it must be "
                f"floating, stacked by expert. Where it is quantised, load the model dequantised, or {ADVICE}"
            )
    owners = {key: key.split(".")[0] for key, _ in module.named_parameters() if "." in key}
    learnt = [key for key, of in owners.items() if of not in ("post_expert_norm", "parametrizations")]
    if learnt:
        raise ValueError(
            f"the activation of experts module ({name}) must have no parameters ({learnt}): {ADVICE}"
        )


def _flag(module: nn.Module, name: str) -> bool:
    return bool(getattr(module, name, FLAGS[name]))


def _up_name(module: nn.Module) -> str:
    return "gate_up_proj" if _flag(module, "has_gate") else "up_proj"


def _expected(module: nn.Module) -> set[str]:
    names = {_up_name(module), "down_proj"}
    return names | {f"{name}_bias" for name in names} if _flag(module, "has_bias") else names


def _tensor(module: nn.Module, name: str) -> Tensor:
    tensor: Tensor = getattr(module, name)
    if hasattr(tensor, "to_local"):
        raise ValueError(
            f"{name} of experts module ({type(module).__name__}) is a DTensor; its part of this rank must be "
            'given to the experts, as DistributedConfig(ep_size=N, ep_implementation="pmoe") does'
        )
    return tensor


def _check_shapes(module: nn.Module, stacks: borrowed.Stacks) -> None:
    w1, w2 = map(stacks.out_features_first, (stacks.w1, stacks.w2))
    experts, d_model, hidden = w2.shape
    wanted = (experts, hidden * (2 if _flag(module, "has_gate") else 1), d_model)
    if tuple(w1.shape) != wanted:
        raise ValueError(
            f"{_up_name(module)} of experts module ({type(module).__name__}) is of shape "
            f"{tuple(stacks.w1.shape)}; beside a down_proj of {tuple(stacks.w2.shape)} it must be "
            f"{(wanted[0], wanted[2], wanted[1]) if stacks.transposed else wanted}: {ADVICE}"
        )


def check_same_place(module: nn.Module, **inputs: Tensor) -> None:
    """Parameters, or inputs by name, must be where the module's first weight is, and of its type."""
    name, first = type(module).__name__, _up_name(module)
    wanted = _tensor(module, first)
    for key, found in (inputs or {key: _tensor(module, key) for key in sorted(_expected(module))}).items():
        if found.is_meta and not inputs:
            raise ValueError(
                f"{key} of experts module ({name}) is on the meta device; it must hold values: load weights, "
                "by from_pretrained or load_state_dict(..., assign=True), before the model is called"
            )
        if found.device != wanted.device:
            raise ValueError(
                f"{key} of experts module ({name}) is on {found.device}; it must be where {first} is: "
                f'model.to("{wanted.device}")'
            )
        if found.dtype != wanted.dtype and not torch.is_autocast_enabled(found.device.type):
            raise ValueError(
                f"{key} of experts module ({name}) is {found.dtype}; it must be of the type of {first}: "
                f"model.to({wanted.dtype}), or call the model under autocast"
            )


def _activation(module: Any) -> tuple[type[borrowed.BorrowedExperts | borrowed.NormedExperts], Any]:
    """The class of the experts and their activation: pmoe's own kernels where it is one of theirs."""
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
    """As pmoe calls it, None where it is none of pmoe's."""
    if activation is F.silu or isinstance(activation, nn.SiLU | SiLUActivation):
        return "silu"
    if activation is F.relu or isinstance(activation, nn.ReLU):
        return "relu"
    exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
    if exact or (isinstance(activation, GELUActivation) and activation.act is F.gelu):
        return "gelu"
    return None
