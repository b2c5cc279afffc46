"""Finds the MoE layers of a model: its submodules, and layers that integrations keep outside of it.

Also finds wrappers around a model, for integrations that take none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from pmoe.layer import MoELayer, run_experts

finders: list[Callable[[nn.Module], Mapping[str, MoELayer]]] = [run_experts.layers]
"""Functions that take a model, and return its MoE layers that are kept outside of it, by name.

transformers' experts modules, for example, are run by layers that are not submodules of the model.
"""


def layers_of(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers of a model by name: its submodules, then layers that are kept outside of it.

    Each function in `finders` returns some of the layers outside of the model, for example those that run
    transformers' experts modules.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    for finder in finders:
        layers |= finder(model)
    return layers


def check_not_wrapped(model: nn.Module, wrappers: tuple[type, ...], cure: str) -> None:
    """Raises ValueError if a wrapper is around a model or around a part of it.

    model: the model.
    wrappers: the classes of wrappers.
    cure: why the integration takes no wrapper, and what to do: the end of the error's text.
    """
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            raise ValueError(f"{name or 'model'} ({type(module).__name__}) must not be wrapped: {cure}")
