"""Who makes the ranks' symmetric heaps (`pmoe.kernels.heap`), with memory from one of:

    virtual_heaps   one process plays all ranks, on one device: for tests and measurements
    process_heap    a process a rank, all on one node, by CUDA IPC; several may share a device
    nvshmem_heap    NVSHMEM, where it is built in; ranks of other nodes too, as far as loads and stores reach

A heap stays until it is closed, or its process ends. Nothing closes it by itself: peers may still write.
"""

from pmoe.comm.heap.providers import close_heaps

__all__ = ["close_heaps"]
