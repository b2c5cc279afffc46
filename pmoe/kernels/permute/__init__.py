"""Moves rows to where their experts read them (permute), and back with a weighted sum (unpermute).

``position_TK`` says where among the N routed rows the row of slot (t, k) lies:

    position   [[1, 0],      x          routed rows
                [2, 5]]      0   ->     1, 0        row 0 is slot (0, 1), row 1 is slot (0, 0)
                             1   ->     2           row 2 is slot (1, 0); slot (1, 1) is dropped, as N = 3

A position outside 0 .. num_rows - 1 is a dropped slot: its row is neither read nor written. The positions in
this range must be distinct and cover it. Nothing checks that.

On CUDA the kernels of cuda/permute do the work, on the CPU PyTorch operations. These also run on CUDA, with
one warning, if the kernels are missing or refuse (`refusal`). Sums are float32 or wider, in the order of k,
and rounded once. Their order does not depend on the number of tokens: a token gets the same bits in any
batch.

Letters: T tokens, K choices, N routed rows (num_rows), M columns.
"""

from pmoe.kernels.permute.operators import permute, refusal, unpermute

__all__ = ["permute", "refusal", "unpermute"]
