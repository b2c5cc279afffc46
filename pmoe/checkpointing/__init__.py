"""Activation checkpointing around MoE layers: the recomputation repeats the decisions of the forward pass."""
