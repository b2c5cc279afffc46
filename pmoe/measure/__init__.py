"""Measurements of this machine and process group, and the files that keep them.

    rounds, bench                               how runs are timed: in rounds, or side by side on lanes
    lines, rates, operations, profile           a profile: costs of products, messages and copies as lines
    black_box                                   costs of a user's own module
    kernel_check, product_choices, products     pmoe's kernels: whether they are right, and faster
    division, fused_kernels                     fused kernels: how many thread blocks communicate
    step_memory                                 peak bytes of a real step
    store                                       files

Letters of this folder: T tokens of all ranks, N rows, W ranks, E experts of a rank, M = d_model, H =
d_hidden, G = H or 2H rows of w1.
"""
