"""Lancet's passes (paper 004) on the graphs of torch.compile: overlap across the whole training step.

Letters of this folder: T tokens, K choices, S = T * K slots, N rows, E experts, E_local of them a rank, W
ranks, R of them that sent, M = d_model.
"""

from pmoe.graph.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
