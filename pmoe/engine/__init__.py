"""The engine: runs a schedule on the lanes of a device, between the two passes of one autograd Function.

Letters of its files: T tokens, K choices, N rows, E experts, W ranks, P of them across nodes, L inside one,
n chunks, M = d_model.
"""
