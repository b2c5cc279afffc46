"""The symmetric heap: memory of one shape on every rank, which its peers write into while kernels run.

cuda/comet/layout.h says where its regions lie, to the kernels and through the extension to `HeapShape`.
`pmoe.comm.heap.providers` makes heaps.

A rank that waits in vain reports it into memory that the host reads, and its kernel ends (`Heap.check`).
That heap is broken then: a new one must be made, on every rank. The process goes on.

Letters: W ranks, E experts of a rank, M = d_model.
"""
