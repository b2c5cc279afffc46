"""COMET's two fused kernels: dispatch + product, and product + sum over top-k choices + combine.

    launcher    launches a kernel, and splits its thread blocks between communication and computation
    operators   functions that launch each step of forward and backward, for all ranks of this process
    backend     the same steps as methods for a process with one rank, which a layer calls

The dispatching kernel writes each row straight into the symmetric heap (`pmoe.kernels.heap`) of the rank that
computes it. A tile of the product starts as soon as its rows have arrived. The combining kernel sends back
columns of the result as soon as they are computed. The kernels are in cuda/comet (COMET, sections 3.1 and
3.2; arXiv 2502.19811).

Rows that arrived are sorted by expert. The rows of one expert are sorted by the rank that sent them: first
this rank, then the ranks with higher numbers, then the ranks from 0 on. Rows from the same rank are in token
order.

For tests and measurements, one process may run several ranks on one device ("virtual ranks"). Each launch
then runs the kernel for all of these ranks.

Letters: T tokens of this rank, K choices of a token, S rows that this rank sends, N rows that it receives, W
ranks, E experts of one rank, M = d_model, H = d_hidden, G = columns of the hidden activation before the
nonlinearity: H, or 2H for SwiGLU. The gradient of a routing weight is a sum over columns. Different thread
blocks compute P partial sums, each over a group of columns.
"""
