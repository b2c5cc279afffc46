"""The MoE layer as a module: construction, a call in four statements, and what else a layer can do.

    moe_layer         MoELayer: its arguments, and a call: begin, decide and run, record, shape the output
    construct         makes the modules of a layer from its arguments, and checks them together
    calls_with_any    calls with inputs that are not plain tensors
    shapes_only       calls without values: on the meta device, or with fake tensors
    predict_memory    predicts the bytes of a call
    reshard           spreads a layer over other ranks, and draws its parameters again
    old_attributes    the old names of a layer's attributes

The letters are those of `pmoe.call`.
"""

from pmoe.layer.moe_layer import MoELayer

__all__ = ["MoELayer"]
