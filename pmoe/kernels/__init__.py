"""Python functions over the CUDA kernels in cuda/. They import without the extension that holds the kernels.

    extension      loads pmoe._cuda, and finds out what each device can run
    registry       chooses which kernel computes a grouped product
    grouped_gemm   grouped products
    permute        moves rows to their experts and back
    route          routing: softmax, top-k, counts, places in sorted order
    comet          COMET's fused kernels
    flashdmoe      one persistent kernel for a whole pass
    heap           memory that other ranks write into while comet or flashdmoe runs

`status` returns which kernels were built, which of them each device can run, and why not.
"""

from pmoe.kernels.extension import status

__all__ = ["status"]
