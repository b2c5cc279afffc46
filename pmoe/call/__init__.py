"""What a call of a layer is: its options and modules, the call itself, and the records that it leaves.

In the order in which a call makes them:

    options     LayerOptions: the arguments of the layer, each checked once
    modules     LayerModules: the modules of the layer and their place among the ranks
    call        Call: the arguments of one call
    routed      the tokens of the call with their routing
    decision    how the call will be run, and what is left of it for those who ask afterwards

Letters of `pmoe.call`, `pmoe.choose`, `pmoe.decide` and `pmoe.layer`: T tokens of this rank, K choices a
token, E experts of the group, F bins of row counts, N rows, M = d_model.
"""
