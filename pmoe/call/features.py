"""The features that a layer asks for, and the reasons why parts of pmoe refuse it.

`pmoe.runners.features.SUPPORTED` is the table of who supports which features.
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
PLAIN_EXPERTS = ("pmoe.experts.ffn", "pmoe.experts.swiglu")
"""The Python modules of the gates and experts that the kernels compute.

A subclass in another module may compute something else, so the kernels refuse it.
"""


def refusal_of(parts: LayerModules, taker: str) -> str | None:
    """Returns why a runner, a source of counts or a prediction does not support a layer; None if it does.

    taker: its name in `pmoe.runners.features.SUPPORTED`.
    """
    feature = refused(taker, parts.features)
    if feature is None:
        return None
    kinds = {name: type(getattr(parts, name)).__name__ for name in ("gate", "experts", "order")}
    values = {name: repr(value) for name, value in vars(parts.spec).items()}
    return feature.value.format(**{**values, **kinds, "memory_reuse": parts.spec.restore})


def features_of(parts: LayerModules) -> frozenset[Feature]:
    """Returns the features that a layer asks for beyond a layer with default options."""
    spec = parts.spec
    gate = parts.gate
    switches = parts.spec.switches
    routes_outside = bool(getattr(parts.router, "has_external_routing", False))
    picks_tokens = bool(getattr(parts.router, "picks_tokens", False))
    # torch gives a parametrized module a class of its own. It computes what its former class says, with other
    # values of its parameters, so that class counts.
    gate_kind, experts_kind = (type_before_parametrizations(module) for module in (gate, parts.experts))
    in_steps = parts.dispatch.in_steps or parts.combine.in_steps
    is_flat = {type(parts.dispatch), type(parts.combine)} == {FlatAllToAll}
    is_asked = {
        Feature.RANKS: parts.ranks.size > 1,
        Feature.SHARDED: parts.grid.is_sharded,
        Feature.HIERARCHICAL: in_steps,
        Feature.OWN_EXCHANGE: not (is_flat or in_steps),
        Feature.SEND_ONCE: spec.send_once,
        Feature.TO_OWN_RANK: not switches.bypass_local,
        Feature.CALLBACKS: bool(parts.callbacks),
        Feature.SHARED_EXPERT: parts.shared_expert is not None,
        Feature.GRADIENTS: parts.gradients is not None,
        Feature.ROTATES: spec.rotates,
        Feature.OFFLOADS: any(pair.offloads for pair in parts.pairs),
        Feature.CHUNKS: spec.fixed_degree not in (None, 1),
        Feature.BUDGET: spec.memory_budget is not None,
        Feature.CAPACITY: spec.capacity_factor is not None,
        Feature.NO_CAPACITY: spec.capacity_factor is None,
        Feature.PADDED: spec.pad_to_capacity,
        Feature.CHECK_FINITE: bool(spec.check_finite),
        Feature.FUSED: spec.fused not in (False, "persistent"),
        Feature.PERSISTENT: spec.fused == "persistent",
        Feature.SEQUENTIAL: switches.sequential,
        Feature.ONE_LANE: switches.one_lane,
        Feature.OWN_ORDER: type(parts.order) is not SortedOrder,
        Feature.PICKS_TOKENS: picks_tokens,
        Feature.KEEPS_ITSELF: bool(getattr(parts.router, "decides_capacity", False)),
        Feature.OTHER_GATE: gate_kind.__module__ not in PLAIN_GATES and not routes_outside,
        Feature.OWN_GATE: not (routes_outside or gate_kind.__module__.startswith("pmoe.gates.")),
        Feature.GATE_MODULE: not (parts.trusts_gate or routes_outside),
        Feature.EXTERNAL_ROUTING: routes_outside,
        Feature.MODULE_EXPERTS: parts.experts.are_modules,
        Feature.OTHER_EXPERTS: experts_kind.__module__ not in PLAIN_EXPERTS,
    }
    return frozenset(feature for feature, holds in is_asked.items() if holds)
