"""Deciding a call before any row moves: its routing, its row counts, and what computes it.

`decide` is the one way through: a source of row counts routes the tokens, all ranks agree, and the source
builds the decision. The sources are exact counts, padded counts, and the kernels of one rank.
"""
