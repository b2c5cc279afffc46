"""Routing in two kernel launches: softmax, top-k, auxiliary loss, rows of each expert and their order.

``torch.ops.pmoe.route`` and ``torch.ops.pmoe.route_backward`` launch the kernels of cuda/route on CUDA: two
kernels in forward, one in backward. The PyTorch expressions of `reference` compute the routing on other
devices, for float64, and if the kernels do not support the sizes (`refusal`). In both cases the host does not
wait for the device, and all runs on one device give the same bits.

Letters: T tokens, K choices of a token, E experts, N = T * K slots, n chunks into which the tokens are
divided.
"""

from pmoe.kernels.route.operators import DeferredRouting, deferred_routing, gate_operands, refusal, route
from pmoe.kernels.route.reference import Routes, top_indices

__all__ = [
    "DeferredRouting",
    "Routes",
    "deferred_routing",
    "gate_operands",
    "refusal",
    "route",
    "top_indices",
]
