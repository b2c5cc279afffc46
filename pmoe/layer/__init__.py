"""`MoELayer`, the module that users build: its construction, its forward, and its other methods.

    moe_layer         MoELayer: its arguments and methods
    construct         makes the layer's gate, experts and grid of ranks from the arguments, and checks them
    calls_with_any    forward for inputs that are not plain tensors
    shapes_only       forward without values: on the meta device, or with fake tensors
    batch_invariant   makes a layer compute each token with the same bits in every batch
    predict_memory    predicts the bytes that a forward and a backward pass take
    run_experts       runs experts that another library owns and routes, by a layer outside of its model
    last_few_rows     statistics of small calls that run_experts computes without running a layer
    reshard           checks that a layer's experts can be spread, and draws new values for its parameters
    old_attributes    attributes of MoELayer under their old names

decision, module, parts, spec and stored_state are old names of modules, kept for one release.

Letters: T tokens of a rank, K experts for each token, E experts of all ranks, W ranks, M = d_model, H =
d_hidden, n chunks (micro-batches) of a batch.
"""

from pmoe.layer.moe_layer import MoELayer

__all__ = ["MoELayer"]
