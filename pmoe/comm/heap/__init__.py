"""Makers of symmetric heaps (`pmoe.kernels.heap`), which fused kernels of all ranks read and write.

A symmetric heap is memory of the same layout on every rank, which the other ranks can address. Each maker
takes the memory from another place:

    virtual_heaps   one process plays all ranks, on one device; for tests and measurements
    process_heap    one process for each rank, all on one node, by CUDA IPC; ranks may share a device
    nvshmem_heap    NVSHMEM, if pmoe was built with it; also ranks of other nodes that NVLink reaches

A heap exists until `close_heaps`, or until its process ends. It is not closed with the last Python object
that uses it, because peers may still write into it.
"""

from pmoe.comm.heap.providers import close_heaps

__all__ = ["close_heaps"]
