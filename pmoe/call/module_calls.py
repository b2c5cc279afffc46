"""Calls of a layer's modules: with their hooks, and through the wrappers of other libraries.

PEFT, torch.compile, checkpoint_wrapper and others replace ``layer.experts`` or ``layer.gate`` by a module
that holds the old one. The layer calls the wrapper, and reads options from the module inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel

from pmoe.experts.base import Experts
from pmoe.gates.base import Gate
from pmoe.gates.logits import router_logits
from pmoe.warn import warn_once

F = TypeVar("F", bound=Callable[..., Any])

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module keeps the hooks that ``register_..._hook`` has registered."""

INSIDE = ("base_layer", "original_module", "_orig_mod", "_checkpoint_wrapped_module", "module")
"""The attributes in which wrappers keep the module that they replace.

The first two are those of PEFT's wrappers, the next two those of torch.compile and of checkpoint_wrapper.
"module" is the attribute of most other wrappers.
"""


class SharedGate(nn.Linear):
    """The gate of the shared expert: returns one score for each of T tokens, (T, 1), in float32 or wider.

    It is a ``torch.nn.Linear`` with d_model inputs, one output and no bias, so tools that look for Linears
    find it.
    """

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            logits = router_logits(input, self.weight)
        return logits if self.bias is None else logits + self.bias


def is_watched(module: nn.Module) -> bool:
    """Returns whether calling a module runs more than the forward of its class: a hook, or a new forward.

    Hooks that are registered for all modules count too
    (``torch.nn.modules.module.register_module_forward_hook``). Some libraries replace ``module.forward`` of a
    single module, for example accelerate's offloading.
    """
    attributes = vars(module)
    for kind in HOOKS:
        if attributes.get(kind):
            return True
    return "forward" in attributes or _has_any_global_hook()


def experts_inside(name: str, module: nn.Module) -> Experts:
    """Returns the `Experts` of a layer's attribute: ``module``, or the first `Experts` inside a wrapper.

    name: name of the layer's attribute, for error messages.
    module: the attribute's value.

    Raises ValueError if there are no `Experts`. Raises it for DistributedDataParallel too: DDP would average
    the parameters of the ranks, but each rank has different experts.
    """
    if isinstance(module, Experts):
        return module
    experts = next((submodule for submodule in module.modules() if isinstance(submodule, Experts)), None)
    if experts is None or isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"{name} (a {type(module).__module__}.{type(module).__qualname__}) must be pmoe.Experts, "
            "or a wrapper that holds them and calls them"
            + (": wrap the whole model, after pmoe.parallelize(model, mesh)" if experts is not None else "")
        )
    return experts


def gate_inside(gate: nn.Module) -> nn.Module:
    """Returns the `pmoe.Gate` inside a wrapper; ``gate`` itself if no Gate is found.

    The layer calls the wrapper, and reads the gate's options from the returned module.

    gate: the layer's gate, perhaps a wrapper.
    """
    module: object = gate
    while isinstance(module, nn.Module):
        if isinstance(module, Gate):
            return module
        module = next((part for name in INSIDE if (part := _submodule(module, name)) is not None), None)
    return gate


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    """Returns the submodule that is registered under ``name``; None if there is none.

    It looks into ``_modules``, because getattr on a wrapper may return an attribute of the module inside.
    """
    return cast("dict[str, nn.Module | None]", vars(module).get("_modules", {})).get(name)


def without_compilation(module: nn.Module) -> Callable[..., Tensor]:
    """Returns the function that calls the experts without torch.compile, even if a user has compiled them.

    A user may have compiled only the experts, with ``torch.compile(layer.experts)`` or
    ``layer.experts.compile()``. In each call the host decides how the experts compute the rows, so a compiled
    graph would fit only one call.
    """
    attributes = vars(module)
    if "_orig_mod" in attributes["_modules"] and not any(attributes.get(kind) for kind in HOOKS):
        module = attributes["_modules"]["_orig_mod"]
    return module if module._compiled_call_impl is None else module._call_impl


def traced_as(traced: Callable[..., Tensor]) -> Callable[[F], F]:
    """Returns a decorator with which torch.compile traces ``traced`` in place of the decorated function.

    torch.compile never compiles the decorated function itself, not even if uncompiled code calls it.
    ``traced`` gets the same arguments. It must take them as (*args, **kwargs), because torch.compile looks
    for default values in the decorated function and not in ``traced``.
    """

    def decorate(function: F) -> F:
        # torch.compiler.disable does the same, but it imports the compiler, which is slow.
        eager: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
        eager._torchdynamo_inline = traced
        return cast(F, eager)

    return decorate


def described(value: object) -> str:
    """Describes a value for errors: a tensor by its shape, dtype and device, others by their class."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype} on {value.device}"
    return f"a {type(value).__name__}"


def check_callbacks(callbacks: Iterable[object], modules: Iterable[nn.Module]) -> None:
    """Checks that no callback was replaced by a wrapper, and warns of hooks on callbacks.

    A layer calls the methods of its callbacks, never the callback itself as a module. So a hook on a callback
    does not run, and a wrapper that replaces a callback is not called.

    callbacks: all callbacks of the layer.
    modules: the layer's ``callback_modules``: those callbacks that are modules, in the same order.

    Raises ValueError if ``modules`` has another module in the place of a callback.
    """
    own = [callback for callback in callbacks if isinstance(callback, nn.Module)]
    for place, (callback, module) in enumerate(zip(own, modules, strict=True)):
        name = f"callback_modules.{place} (a {type(module).__name__})"
        if module is not callback:
            raise ValueError(
                f"{name} must be the {type(callback).__name__} of the layer's callbacks: a layer calls "
                "methods of its callbacks, so a wrapper in the place of one is never called"
            )
        hooks = [kind.strip("_") for kind in HOOKS if vars(module).get(kind)]
        if hooks:
            warn_once(
                f"{name} has {' and '.join(hooks)} that are not called: a layer calls a callback's methods, "
                "not the callback. Register them on the layer, or on modules that the callback calls",
                for_each_reason=True,
            )
