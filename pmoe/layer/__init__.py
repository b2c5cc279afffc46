"""The MoE layer as a module: its construction, its call, and everything else that a layer can do.

    moe_layer         MoELayer: its arguments, and a call: begin, decide and run, record, shape the output
    construct         makes the modules of a layer from its arguments, and checks them together
    calls_with_any    calls with inputs that are not plain tensors
    shapes_only       calls without values: on the meta device, or with fake tensors
    predict_memory    predicts the bytes of a call
    reshard           spreads a layer over other ranks, and draws new values for its parameters

Letters: T tokens of a rank, K experts for each token, E experts of all ranks, W ranks, M = d_model, H =
d_hidden, n chunks (micro-batches) of a batch.
"""

from pmoe.layer.moe_layer import MoELayer

__all__ = ["MoELayer"]
