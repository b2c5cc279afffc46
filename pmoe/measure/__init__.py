"""Rates of this machine and group, measured and stored.

Letters of this folder: T tokens of all ranks, N rows, W ranks, E experts of a rank, M = d_model,
H = d_hidden, G = H or 2H rows of w1.
"""
