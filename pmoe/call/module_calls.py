"""How a layer calls its modules: with their hooks, and through the wrappers of other libraries.

PEFT, torch.compile, checkpoint_wrapper and others replace ``layer.experts`` or ``layer.gate`` by a module
that holds the old one. The layer calls the wrapper, and reads options from the module inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel

from pmoe.experts.base import Experts
from pmoe.gates.base import Gate
from pmoe.gates.logits import router_logits
from pmoe.warn import warn_once

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a module keeps the hooks that ``register_..._hook`` has registered."""

INSIDE = ("base_layer", "original_module", "_orig_mod", "_checkpoint_wrapped_module", "module")
"""Attributes in which wrappers keep the module that they replace: PEFT (two kinds), torch.compile,
checkpoint_wrapper, and most others."""


class SharedGate(nn.Linear):
    """The score (T, 1) of each token for the shared expert, in float32 or wider: rows may be narrower.

    A ``torch.nn.Linear`` of d_model inputs, one output and no bias, so tools that look for Linears find it.
    """

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            logits = router_logits(input, self.weight)
        return logits if self.bias is None else logits + self.bias


def is_watched(module: nn.Module) -> bool:
    """Whether a call of a module does more than its class says: it has hooks, or a replaced forward.

    Hooks for all modules count too (``torch.nn.modules.module.register_module_forward_hook``). accelerate's
    offloading replaces ``module.forward``.
    """
    attributes = vars(module)
    has_hooks = any(attributes.get(kind) for kind in HOOKS)
    return has_hooks or "forward" in attributes or _has_any_global_hook()


def experts_inside(name: str, module: nn.Module) -> Experts:
    """The `Experts` that ``module`` is, or that a wrapper in their place holds.

    name: the layer's attribute, for errors. Raises ValueError where there are none, and for
    DistributedDataParallel, which would take each rank's experts for copies of the same ones.
    """
    if isinstance(module, Experts):
        return module
    inside = next((part for part in module.modules() if isinstance(part, Experts)), None)
    if inside is None or isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"{name} (a {type(module).__module__}.{type(module).__qualname__}) must be pmoe.Experts, "
            "or a wrapper that holds them and calls them"
            + (": wrap the whole model, after pmoe.parallelize(model, mesh)" if inside is not None else "")
        )
    return inside


def gate_inside(gate: nn.Module) -> nn.Module:
    """The `pmoe.Gate` inside a wrapper, else the module itself. The gate's options are read from it."""
    module: object = gate
    while isinstance(module, nn.Module):
        if isinstance(module, Gate):
            return module
        module = next((part for name in INSIDE if (part := _submodule(module, name)) is not None), None)
    return gate


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    return cast("dict[str, nn.Module | None]", vars(module).get("_modules", {})).get(name)


def without_compilation(module: nn.Module) -> Callable[..., Tensor]:
    """The function that calls experts, uncompiled where torch.compile was applied to them alone.

    The host decides in each call what experts do with rows, so a compiled graph would fit one call only.
    """
    attributes = vars(module)
    if "_orig_mod" in attributes["_modules"] and not any(attributes.get(kind) for kind in HOOKS):
        module = attributes["_modules"]["_orig_mod"]
    return module if module._compiled_call_impl is None else module._call_impl


def described(value: object) -> str:
    """A value in an error message: a tensor's shape, type and device, or the name of the value's class."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype} on {value.device}"
    return f"a {type(value).__name__}"


def check_callbacks(callbacks: Iterable[object], modules: Iterable[nn.Module]) -> None:
    """Checks that callbacks which are modules were not replaced, and warns of hooks on them.

    Raises ValueError where ``callback_modules`` has another module in a callback's place: a layer calls the
    methods of the callback that it was given. No call of a layer runs hooks on callbacks.

    modules: ``callback_modules``, which holds the callbacks that are modules.
    """
    own = [callback for callback in callbacks if isinstance(callback, nn.Module)]
    for place, (callback, module) in enumerate(zip(own, modules, strict=True)):
        name = f"callback_modules.{place} (a {type(module).__name__})"
        if module is not callback:
            raise ValueError(
                f"{name} must be the {type(callback).__name__} of the layer's callbacks, whose methods are "
                "called: a wrapper in its place would do nothing"
            )
        hooks = [kind.strip("_") for kind in HOOKS if vars(module).get(kind)]
        if hooks:
            warn_once(
                f"{name} has {' and '.join(hooks)} that are not called: a layer calls a callback's methods, "
                "not the callback. Register them on the layer, or on modules that the callback calls",
                for_each_reason=True,
            )
