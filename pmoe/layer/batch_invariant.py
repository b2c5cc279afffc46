"""Makes a layer batch-invariant: a token's output has the same bits in every batch.

`change` changes the classes of a layer's modules. Their parameters stay the same:

    experts, shared expert   compute their rows in tiles of a fixed shape (`pmoe.experts.batch_invariant`)
    gate                     routes tokens in tiles of a fixed shape (`pmoe.gates.batch_invariant`)
    order                    adds the results of a token one by one (`pmoe.ordering.in_turn`)

Everything else of a call copies rows, which changes no bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from pmoe.call.modules import LayerModules
from pmoe.experts.batch_invariant import BatchInvariantFFN, BatchInvariantSwiGLU
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.gates.batch_invariant import (
    BatchInvariantDeepSeek,
    BatchInvariantSigmoid,
    BatchInvariantSwitch,
    BatchInvariantTopK,
)
from pmoe.gates.deepseek import DeepSeekGate
from pmoe.gates.external import ExternalGate
from pmoe.gates.hash import HashGate
from pmoe.gates.sigmoid import SigmoidGate
from pmoe.gates.switch import SwitchGate
from pmoe.gates.topk import TopKGate
from pmoe.ordering.in_turn import InTurnOrder
from pmoe.ordering.sorted import SortedOrder

if TYPE_CHECKING:
    from pmoe.layer.moe_layer import MoELayer

EXPERTS: Mapping[type[nn.Module], type[nn.Module]] = {
    FFNExperts: BatchInvariantFFN,
    SwiGLUExperts: BatchInvariantSwiGLU,
}
"""The batch-invariant class of each class of experts that has one."""

GATES: Mapping[type[nn.Module], type[nn.Module]] = {
    TopKGate: BatchInvariantTopK,
    SwitchGate: BatchInvariantSwitch,
    SigmoidGate: BatchInvariantSigmoid,
    DeepSeekGate: BatchInvariantDeepSeek,
    HashGate: HashGate,
    ExternalGate: ExternalGate,
}
"""The batch-invariant class of each gate that has one.

The last two gates compute nothing from a token's values, so they are batch-invariant themselves.
"""


def check_invariant(modules: LayerModules, name: str = "") -> None:
    """Raises ValueError if a layer cannot be batch-invariant.

    modules: the layer's modules and options.
    name: the layer's name in its model; "" for the model itself.
    """
    reason = modules.refusal("batch invariance") or _module_problem(modules)
    if reason is not None:
        layer = f"layer {name!r}" if name else "the layer"
        raise ValueError(f"{layer} cannot be batch-invariant (pmoe.make_batch_invariant) where {reason}")


def _module_problem(modules: LayerModules) -> str | None:
    """Returns why a layer cannot be batch-invariant, in words; None if it can.

    Most often the class of a module has no batch-invariant version. The text then names this module.
    """
    for part, module, classes in (
        ("experts", modules.experts, EXPERTS),
        ("shared_expert", modules.shared_expert, EXPERTS),
        ("gate", modules.router, GATES),
    ):
        if module is not None and type(module) not in (*classes, *classes.values()):
            known = ", ".join(kind.__name__ for kind in classes)
            return f"{part} ({type(module).__name__}) is none of {known}"
    if modules.shared_gate is not None:
        return "shared_gate (True) scales the shared expert by a product of all tokens"
    if type(modules.order) not in (SortedOrder, InTurnOrder):
        return f"the order is a {type(modules.order).__name__}, not the sorted one"
    return None


def change(layer: MoELayer) -> None:
    """Gives the modules of a layer their batch-invariant classes.

    The module objects stay the same, and so do their parameters, hooks and all references to them. If another
    library has wrapped a module, the module inside the wrapper is changed.
    """
    modules = layer.layer_modules
    for module, classes in (
        (modules.experts, EXPERTS),
        (modules.shared_expert, EXPERTS),
        (modules.router, GATES),
    ):
        if module is not None:
            module.__class__ = classes.get(type(module), type(module))
    layer.order = InTurnOrder()  # this also makes the layer read its modules again
