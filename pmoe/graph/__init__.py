"""Lancet's passes (paper 004) on the graphs of torch.compile: overlap across the whole training step."""

from pmoe.graph.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
