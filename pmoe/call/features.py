"""The features that a layer asks for, and the reasons why parts of pmoe cannot compute a layer.

The table `pmoe.runners.features.SUPPORTED` says which part supports which features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.utils.parametrize import type_before_parametrizations

from pmoe.comm.base import FlatAllToAll
from pmoe.ordering.sorted import SortedOrder
from pmoe.runners.features import Feature, refused

if TYPE_CHECKING:
    from pmoe.call.modules import LayerModules

PLAIN_GATES = ("pmoe.gates.topk", "pmoe.gates.switch")
PLAIN_EXPERTS = ("pmoe.experts.ffn", "pmoe.experts.swiglu", "pmoe.experts.lora")
"""The Python modules with the classes of experts that pmoe's kernels can compute.

A subclass in another module may compute something else, so the kernels refuse it. Experts with adapters
(lora) count as a feature that a kernel must support.
"""


def refusal_of(modules: LayerModules, component: str) -> str | None:
    """Returns why a part of pmoe cannot take a layer: a text about a feature that the part does not support.

    Returns None if the part supports all features of the layer.

    modules: the modules and options of the layer.
    component: the part's name in `pmoe.runners.features.SUPPORTED`. A part is a runner, which computes
        calls; a source of row counts; or a prediction of times or memory.
    """
    feature = refused(component, modules.features)
    if feature is None:
        return None
    kinds = {name: type(getattr(modules, name)).__name__ for name in ("gate", "experts", "order")}
    values = {name: repr(value) for name, value in vars(modules.options).items()}
    return feature.value.format(**{**values, **kinds, "memory_reuse": modules.options.restore})


def features_of(modules: LayerModules) -> frozenset[Feature]:
    """Returns a layer's features: properties that a default layer lacks, such as a shared expert."""
    options = modules.options
    gate = modules.gate
    switches = modules.options.switches
    routes_outside = bool(getattr(modules.router, "has_external_routing", False))
    picks_tokens = bool(getattr(modules.router, "picks_tokens", False))
    # torch gives a parametrized module a class of its own. The module still computes as its former class,
    # only with other values of its parameters, so the former class counts.
    gate_kind, experts_kind = (type_before_parametrizations(module) for module in (gate, modules.experts))
    in_steps = modules.dispatch.in_steps or modules.combine.in_steps
    is_flat = {type(modules.dispatch), type(modules.combine)} == {FlatAllToAll}
    is_asked = {
        Feature.RANKS: modules.ranks.size > 1,
        Feature.SHARDED: modules.grid.is_sharded,
        Feature.HIERARCHICAL: in_steps,
        Feature.OWN_EXCHANGE: not (is_flat or in_steps),
        Feature.SEND_ONCE: options.send_once,
        Feature.WIRE: modules.wires is not None and modules.wires.dispatches,
        Feature.WIRE_COMBINE: modules.wires is not None and modules.wires.results is not None,
        Feature.TO_OWN_RANK: not switches.bypass_local,
        Feature.CALLBACKS: bool(modules.callbacks),
        Feature.HOOKS: modules.hooks is not None,
        # With d_latent the shared expert is outside of what the parts compute (`pmoe.decide.latent_call`).
        Feature.SHARED_EXPERT: modules.shared_expert is not None and options.d_latent is None,
        Feature.GRADIENTS: modules.gradients is not None,
        Feature.ROTATES: options.rotates,
        Feature.OFFLOADS: any(pair.offloads for pair in modules.pairs),
        Feature.MESSAGES: any(pair.dispatched == "message" for pair in modules.pairs),
        Feature.HIDDEN_E4M3: any(pair.rounds for pair in modules.pairs),
        Feature.PRODUCTS: options.products is not None,
        Feature.CHUNKS: options.fixed_degree not in (None, 1),
        Feature.BUDGET: options.memory_budget is not None,
        Feature.CAPACITY: options.capacity_factor is not None,
        Feature.NO_CAPACITY: options.capacity_factor is None,
        Feature.PADDED: options.pad_to_capacity,
        Feature.CHECK_FINITE: bool(options.check_finite),
        Feature.FUSED: options.fused not in (False, "persistent"),
        Feature.PERSISTENT: options.fused == "persistent",
        Feature.PROGRAM: switches.program,
        Feature.SEQUENTIAL: switches.sequential,
        Feature.ONE_LANE: switches.one_lane,
        Feature.OWN_ORDER: type(modules.order) is not SortedOrder,
        Feature.PICKS_TOKENS: picks_tokens,
        Feature.KEEPS_ITSELF: bool(getattr(modules.router, "decides_capacity", False)),
        Feature.OTHER_GATE: gate_kind.__module__ not in PLAIN_GATES and not routes_outside,
        Feature.OWN_GATE: not (routes_outside or gate_kind.__module__.startswith("pmoe.gates.")),
        Feature.GATE_MODULE: not (modules.trusts_gate or routes_outside),
        Feature.EXTERNAL_ROUTING: routes_outside,
        Feature.MODULE_EXPERTS: modules.experts.are_modules,
        Feature.OTHER_EXPERTS: experts_kind.__module__ not in PLAIN_EXPERTS,
        Feature.LATENT: options.d_latent is not None,
        Feature.COPIES: modules.has_copies,
        Feature.ADAPTERS: experts_kind.__module__ == "pmoe.experts.lora",
    }
    return frozenset(feature for feature, holds in is_asked.items() if holds)
