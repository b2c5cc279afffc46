"""Activation checkpointing around MoE layers: the recomputation must route tokens as the forward pass did.

contexts        checkpoint_contexts: records routing and other decisions, and repeats them in the
                recomputation
replay          the interface through which a call of a layer records or repeats its decisions
routing_check   detects changed routing under checkpoints that do not use checkpoint_contexts
selective       makes selective checkpoints recompute a layer as a whole
"""
