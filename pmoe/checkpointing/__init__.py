"""Activation checkpointing around a layer: the second pass repeats the decisions of the first."""
