"""Routing: softmax, top-k, auxiliary loss, rows of each expert, and their order, in two kernel launches.

``torch.ops.pmoe.route`` and ``torch.ops.pmoe.route_backward`` launch the kernels of cuda/route on CUDA: two
in forward, one in backward. On other devices, for float64, and if the kernels do not take the sizes
(`refusal`), the PyTorch expressions of `reference` compute the same. In both cases the host does not wait for
the device, and each run on one device gives the same bits.

Letters: T tokens, K choices of a token, E experts, N = T * K slots, n chunks into which the tokens are
divided.
"""

from pmoe.kernels.route.operators import DeferredRouting, deferred_routing, refusal, route
from pmoe.kernels.route.reference import Routes, top_indices

__all__ = ["DeferredRouting", "Routes", "deferred_routing", "refusal", "route", "top_indices"]
