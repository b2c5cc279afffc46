"""The runners, which compute a call once its routing, chunks and restore pair are decided.

All have the interface `pmoe.engine.autograd.Runner`.

    pipeline      both passes by the engine, in chunks (micro-batches)
    fused         COMET's fused kernels, or one persistent kernel for each pass (FlashDMoE)
    fused_steps   finds the fused kernels for a call, and the shared memory on which they run
    program       both passes as programs, which are compiled from the engine's schedules
    bounded_program
                  the same if the host knows no row count (`pmoe.BoundedSteps`), for CUDA graphs
    one_rank      the kernels for a single rank
    few_rows      calls with few rows and without gradients, such as decoding
    features      the table of the features that each runner supports
"""
