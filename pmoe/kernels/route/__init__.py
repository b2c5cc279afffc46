"""Routing in two kernel launches: softmax, top-k, auxiliary loss, rows of each expert and their order.

``torch.ops.pmoe.route`` and ``torch.ops.pmoe.route_backward`` launch the kernels of cuda/route on CUDA: two
kernels in forward, one in backward. The PyTorch expressions of `reference` compute the routing on other
devices, for float64, and if the kernels do not support the sizes (`refusal`). In both cases the host does not
wait for the device, and all runs on one device give the same bits.

Letters: T tokens, K choices of a token, E experts, N = T * K slots, n chunks into which the tokens are
divided.
"""

from typing import TYPE_CHECKING

from pmoe.kernels import late_names

if TYPE_CHECKING:
    from pmoe.kernels.route.launches import gate_operands, refusal
    from pmoe.kernels.route.operators import DeferredRouting, deferred_routing, route
    from pmoe.kernels.route.reference import Routes, top_indices

_LATER = {
    "DeferredRouting": "operators",
    "Routes": "reference",
    "deferred_routing": "operators",
    "gate_operands": "launches",
    "refusal": "launches",
    "route": "operators",
    "top_indices": "reference",
}
"""Names of this package and their files. A file is imported when one of its names is first used."""

__all__ = [
    "DeferredRouting",
    "Routes",
    "deferred_routing",
    "gate_operands",
    "refusal",
    "route",
    "top_indices",
]

# Hidden from type checkers: with a __getattr__ they would accept every mistyped name.
if not TYPE_CHECKING:
    __getattr__ = late_names(__name__, _LATER)
