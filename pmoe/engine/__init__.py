"""The engine: runs the schedules of a layer's forward and backward pass on the lanes of a device.

    autograd    the one autograd Function, which holds both passes; the interface `Runner`
    plan/       the rows of each chunk: records, how they are made, unequal chunks, the hooks of callbacks
    passes/     the buffers and messages of a pass, and the method of each kind of task, forward and backward
    variants/   features that only some layers have, each in front of both passes
    lanes/      tasks side by side: on the CPU, in threads, on CUDA streams; the record of when each ran
    buffers/    the memory of a pass: ring slots on the device, and host memory

Letters of these files: T tokens, K choices, N rows, E experts, W ranks, P of them across nodes, L inside one
node, n chunks, M = d_model.
"""
