"""Rows to where their experts read them (permute), and back, summed with their weights (unpermute).

Both go by ``position_TK``: where in the routed rows the row of slot (t, k) stands. A position outside
0 .. num_rows - 1 is a dropped slot, whose row is neither read nor written. The positions in range are
distinct and cover 0 .. num_rows - 1; that is the caller's to see to, nothing checks it.

The kernels of cuda/permute run on CUDA, and PyTorch operations on the CPU. Where the kernels are missing or
refuse (`refusal`), the PyTorch operations run on CUDA, too, and warn once. Sums are in float32 or wider, in
the order of k, and rounded once. The order of no kernel's sum depends on the number of tokens: a token gets
the same bits in any batch.

Letters: T tokens, K choices, N routed rows (num_rows), M columns.
"""

from pmoe.kernels.permute.operators import permute, refusal, unpermute

__all__ = ["permute", "refusal", "unpermute"]
