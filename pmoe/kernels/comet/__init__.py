"""COMET's two fused kernels: dispatch + product, and product + top-k reduction + combine.

    launcher   one launch for the ranks of this process, and how its blocks are divided
    launches   the four fused steps and the plain dispatch, as launches
    steps      the same steps for one rank, as a layer calls them

Rows are written straight into the heap of the rank that computes them (`pmoe.kernels.heap`). Tiles of a
product start as soon as their rows have arrived. On the way back, columns of the result leave as soon as they
are computed. The kernels are in cuda/comet (COMET, sections 3.1 and 3.2; arXiv 2502.19811).

Rows that arrived are sorted by expert. An expert's rows are sorted by source rank: this rank first, then
upwards around the ranks. Rows of one source keep the order in which it sends them, which is token order.

One process may run several ranks on one device (virtual ranks, for tests and measurements). They are then
launched together.

Letters: T tokens of this rank, K choices, S rows that leave, N rows that arrive, W ranks, E experts of a
rank, P parts of the columns, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""
