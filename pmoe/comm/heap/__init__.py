"""Makes symmetric heaps (`pmoe.kernels.heap`), which fused kernels of all ranks read and write.

A symmetric heap is memory with the same layout on every rank, which the other ranks can address. Three
functions make heaps from memory of different sources:

    virtual_heaps   one process acts as all ranks, on one device; for tests and measurements
    process_heap    one process for each rank, all on one node, by CUDA IPC; ranks may share a device
    nvshmem_heap    NVSHMEM, if pmoe was built with it; also ranks of other nodes that NVLink reaches

Pass programs have heaps of their own (`pmoe.comm.heap.program_heap`), one for each process of a node.

A heap exists until `close_heaps`, or until its process ends. A heap that no Python object uses any longer is
not closed, because peers may still write into it. `check_program_heaps` raises an error if an exchange of a
pass program has waited too long.
"""

from pmoe.comm.heap.closing import close_heaps
from pmoe.comm.heap.program_heap import check_program_heaps

__all__ = ["check_program_heaps", "close_heaps"]
