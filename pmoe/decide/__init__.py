"""The first half of a call, before any row moves: decides its routing, its row counts, and its runner.

    begin           checks that all ranks can make this call together
    sources         picks the source of row counts: exact, fused, padded, or one rank's
    route           checks the input and calls the gate; every source begins with it
    experts_call    `decide`: the ranks agree on the numbers, and the source builds a `Decision`
                    `run`: computes what was decided

The other modules hold what only some layers or calls need: custom gates, CUDA graphs, fused kernels, state
dicts.
"""
