"""Routing in two launches: softmax, top-k, counts, places in sorted order, auxiliary loss.

``torch.ops.pmoe.route`` and ``torch.ops.pmoe.route_backward`` are the kernels of cuda/route on CUDA, and the
PyTorch expressions of `reference` elsewhere, for float64, and for what `refusal` names. No host
synchronisation in either. Forward is two kernels and backward is one; each gives the same bits every
time on one device.

Letters: T tokens, K choices, E experts, N = T*K slots, n chunks.
"""

from pmoe.kernels.route.operators import Promise, promise, refusal, route
from pmoe.kernels.route.reference import Routes, top_indices

__all__ = ["Promise", "Routes", "promise", "refusal", "route", "top_indices"]
