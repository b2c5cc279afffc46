"""The symmetric heap: memory of one shape on every rank, which its peers write into while kernels run.

cuda/comet/layout.h says where its regions lie, to the kernels and through the extension to `HeapShape`. The
memory comes from one of:

    virtual_heaps   one process plays all ranks, on one device: for tests and measurements
    process_heap    a process a rank, all on one node, by CUDA IPC; several may share a device
    nvshmem_heap    NVSHMEM, where it is built in; ranks of other nodes too, as far as loads and stores reach

A rank that waits in vain reports it into memory that the host reads, and its kernel ends (`Heap.check`).
That heap is broken then: a new one must be made, on every rank. The process goes on.

A heap stays until it is closed, or its process ends. Nothing closes it by itself: peers may still write.

Letters: W ranks, E experts of a rank, M = d_model.
"""

from pmoe.comm.heap.device_memory import host_name
from pmoe.comm.heap.providers import close_heaps, heap_for, nvshmem_heap, process_heap, virtual_heaps
from pmoe.comm.heap.rank_heap import Heap
from pmoe.comm.heap.shape import CellShape, HeapError, HeapShape

__all__ = [
    "CellShape",
    "Heap",
    "HeapError",
    "HeapShape",
    "close_heaps",
    "heap_for",
    "host_name",
    "nvshmem_heap",
    "process_heap",
    "virtual_heaps",
]
