"""The runners, which compute decided calls. Each has the interface `pmoe.engine.autograd.Runner`.

pipeline      both passes by the engine, in chunks
fused         COMET's fused kernels or one persistent kernel a pass; fused_steps finds them
one_rank      the kernels of a single rank
features      the table of the features that each of them supports
"""
