"""COMET's two fused kernels: dispatch + product, and product + top-k reduction + combine.

Rows are written straight into the heap of the rank that computes them (`pmoe.kernels.heap`), and tiles of the
product start as their rows arrive; on the way back the columns of the result leave as they are computed. The
kernels are in cuda/comet. (COMET, sections 3.1 and 3.2; arXiv 2502.19811.)

Rows that have arrived are sorted by expert, inside an expert by source rank, this rank's own first and then
upwards around the ranks, inside a source in the order in which it sends: by token.

Several ranks may be one process's (virtual ranks on one device, for tests and measurements): then they are
launched together.

Letters: T tokens of this rank, K choices, S rows that leave, N rows that arrive, W ranks, E experts of a
rank, P parts of the columns, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""
