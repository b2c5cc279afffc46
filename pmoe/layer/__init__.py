"""The MoE layer: gate, order, dispatch, experts, combine, in the order a token meets them.

`module` has the layer itself, `forward` its stages in reading order; `route`, `plans`, `choose` and `run` are
what they do. Calls that go another way: `alone`, `fused`, `padded`; `capture` says what a CUDA graph holds.
"""

from pmoe.layer.module import MoELayer

__all__ = ["MoELayer"]
