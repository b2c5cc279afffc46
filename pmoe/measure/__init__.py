"""Measurements of this machine and of a group of ranks, and the files that store them.

    timing, bench                               how runs are timed: in alternating rounds, or side by side
    line_fits, rates, operations, profile       a profile: seconds of products, messages and copies by size
    module_cost, layer_modules                  the cost of a user's own module, of a layer's gate and order
    kernel_check, product_choices, products     pmoe's kernels: whether they are right, and faster
    block_split, fused_kernels                  fused kernels: how many thread blocks communicate
    step_memory                                 peak bytes of a real step
    store                                       JSON files

Letters of this folder: T tokens of all ranks, N rows, W ranks, E experts of a rank, M = d_model, H =
d_hidden, G = columns of the hidden activation before the nonlinearity: H, or 2H for SwiGLU.
"""
