"""Routing in two kernel launches: softmax, top-k, auxiliary loss, rows of each expert and their order.

``torch.ops.pmoe.route`` and ``torch.ops.pmoe.route_backward`` launch the kernels of cuda/route on CUDA: two
kernels in forward, one in backward. The PyTorch expressions of `reference` compute the routing on other
devices, for float64, and if the kernels do not support the sizes (`refusal`). In both cases the host does not
wait for the device, and all runs on one device give the same bits.

Letters: T tokens, K choices of a token, E experts, N = T * K slots, n chunks into which the tokens are
divided.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmoe.kernels.route.launches import gate_operands, refusal
    from pmoe.kernels.route.operators import DeferredRouting, deferred_routing, route
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

# Hidden from type checkers: with a __getattr__ they would accept every mistyped name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns a name of `launches`, `reference` or `operators`, after importing that file.

        It is then an attribute of the package, so that later uses do not come here.
        """
        if name not in __all__:
            raise AttributeError(f"module 'pmoe.kernels.route' has no attribute {name!r}")
        if name in ("gate_operands", "refusal"):
            from pmoe.kernels.route import launches as file
        elif name in ("Routes", "top_indices"):
            from pmoe.kernels.route import reference as file
        else:
            from pmoe.kernels.route import operators as file

        value = getattr(file, name)
        globals()[name] = value
        return value
