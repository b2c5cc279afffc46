"""The engine: runs the schedules of a layer's forward and backward pass on the lanes of a device.

    autograd                      the one autograd Function, which holds both passes; the interface `Runner`
    plan, cut, rearranged         the rows of each chunk: records, how they are made, unequal chunks
    passes                        the base of both passes: buffers and messages
    forward_pass, backward_pass   the method of each kind of task
    padding, hooked, shared_expert, sharded, once, offloaded
                                  features that only some layers have, each on top of both passes
    callbacks                     the hooks that users write
    lanes, cuda_lanes, thread_lanes
                                  tasks side by side: on the CPU, on CUDA streams, in threads
    arena, host_pool              the memory of a pass
    replay, recompute, rerouting, selective
                                  activation checkpointing
    recording                     when each task really ran

Letters of these files: T tokens, K choices, N rows, E experts, W ranks, P of them across nodes, L inside one
node, n chunks, M = d_model.
"""
