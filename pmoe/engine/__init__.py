"""The engine: runs the tasks of a layer's forward and backward pass on the lanes of a device.

A schedule lists the tasks of a pass, for example "send chunk 0". A lane is a CUDA stream, or a thread on the
CPU. A lane runs its tasks one after another; several lanes run at the same time.

    autograd    the one autograd Function, which contains both passes; the interface `Runner`
    plan/       which rows each chunk (micro-batch) sends, receives and computes
    passes/     the buffers of a pass, and a method for each kind of task, forward and backward
    variants/   features that only some layers have, each as subclasses of the two passes
    lanes/      the lanes on the CPU and on a GPU, and the recorder of when each task ran
    buffers/    the memory of a pass: reused device memory, and host memory for offloaded tensors

Letters in these files: T tokens of a rank, K experts per token, N rows that a rank's experts receive, E
experts, n chunks, M = d_model. The W ranks of a layer are P * L: experts are distributed over P ranks, and
each expert is split over L ranks of a node (L = 1 unless experts are sharded).
"""
