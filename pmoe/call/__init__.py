"""The records of a call: the layer's options and modules, the call's arguments, its routing, its decision.

The modules with the main records, in the order in which a call makes them:

    options     the arguments of the layer, each checked once
    modules     the modules of the layer and its place among the ranks
    call        Call: the arguments of one call
    routed      the tokens of the call with their routing
    decision    Decision: how the call will be run; LastCall: what the layer keeps of the call afterwards

Letters of `pmoe.call`, `pmoe.choose`, `pmoe.decide` and `pmoe.layer`: T tokens of this rank, K choices of a
token (experts that it is sent to), E experts of all ranks, N rows, M = d_model, and F bins. A bin is one of F
equal ranges of a rank's tokens; rows are counted for each bin.
"""
