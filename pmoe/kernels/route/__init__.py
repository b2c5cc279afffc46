"""Routing: softmax, top-k, counts, places in sorted order and the auxiliary loss, in two launches.

``torch.ops.pmoe.route`` and ``torch.ops.pmoe.route_backward`` run the kernels of cuda/route on CUDA. The
PyTorch expressions of `reference` run elsewhere, for float64, and if `refusal` gives a reason. Neither
waits for the device. Forward is two kernels, backward is one. Each gives the same bits every time on one
device.

Letters: T tokens, K choices, E experts, N = T*K slots, n chunks.
"""

from pmoe.kernels.route.operators import DeferredRouting, deferred_routing, refusal, route
from pmoe.kernels.route.reference import Routes, top_indices

__all__ = ["DeferredRouting", "Routes", "deferred_routing", "refusal", "route", "top_indices"]
