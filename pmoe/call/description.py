"""Texts that describe the options of a layer.

Ranks compare the texts. Results of trials are stored under the texts.
"""

from __future__ import annotations

from dataclasses import fields

from pmoe.call.modules import LayerModules
from pmoe.settings import NO_SETTINGS, PLAIN

COMPARED = ("gate", "experts", "shared_expert", "order", "dispatch", "combine", "shared_gate")
"""The fields of `LayerModules` whose modules must have the same class and settings on every rank."""


def options_in_words(modules: LayerModules, *, of_users: bool = False) -> dict[str, str]:
    """Returns the options of a layer, and the classes and settings of its modules, as texts by name.

    Ranks compare these texts, because all ranks must have built the same layer.

    modules: the modules and options of the layer.
    of_users: whether to include settings of modules that pmoe does not define. The texts that ranks compare
        leave these settings out, because ranks may differ in them.
    """
    option_texts = {field.name: getattr(modules.options, field.name) for field in fields(modules.options)}
    others = {
        "callbacks": f"{'without' if modules.hooks is None else 'with'} hooks inside the layer",
        "a GradientReducer": modules.gradients is not None,
    }
    module_texts = {name: _described(getattr(modules, name), of_users) for name in COMPARED}
    return {name: str(value) for name, value in (option_texts | module_texts | others).items()}


def _described(module: object, of_users: bool) -> str:
    """Returns the class of a module, its plain attributes, and the dtypes of its own parameters, as a text.

    The text holds no addresses and nothing random, so equal modules have equal texts in all processes.

    module: the module.
    of_users: whether to include attributes and dtypes of classes outside pmoe. If not, the text for one of
        these classes is only its name.

    Example: "TopKGate(normalize=True, top_k=2, weight=torch.float32, z_loss_weight=0.0)"
    """
    module_type = type(module)
    if module is None:
        return "None"
    if not (of_users or module_type.__module__.startswith("pmoe.")):
        return module_type.__name__
    parameters = vars(module).get("_parameters", {}).items()
    attributes = vars(module) | {
        name: parameter.dtype for name, parameter in parameters if parameter is not None
    }
    names = [name for name in sorted(attributes) if isinstance(attributes[name], PLAIN) and name[0] != "_"]
    settings = ", ".join(f"{name}={attributes[name]!r}" for name in names if name not in NO_SETTINGS)
    return f"{module_type.__name__}({settings})"
