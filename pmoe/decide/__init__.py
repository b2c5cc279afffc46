"""The first half of a layer's call, before any row is sent: routes the tokens and decides how to run.

    begin           checks that all ranks can make this call together
    sources         picks where the row counts come from: an exchange among ranks, the capacity, or the
                    kernels of a single rank
    route           checks the input and calls the gate
    experts_call    `ExpertsCall.decide`: the ranks agree on row counts, number of chunks and restore pair
                    (how backward gets the experts' input and hidden activation); the result is a `Decision`.
                    `run`: sends the rows and computes the experts according to the `Decision`

The other modules are for features that only some layers use: custom gates, CUDA graphs, fused kernels, the
solver, state dicts.

Words of this folder:

    row          a copy of a token for one of its experts
    row counts   how many rows each rank sends to each expert of every rank
    n            the number of chunks (micro-batches) of a pass
    bin          the unit in which rows are counted: one of many equal parts of the batch. A chunk consists
                 of whole bins
    fault        a mistake on one rank. Its number (`Fault`) is sent with the row counts, so that all ranks
                 raise
"""
