"""Python functions that call pmoe's CUDA kernels (cuda/). Importing them needs no compiled extension.

    extension         loads the compiled extension `pmoe._cuda`, and finds which kernels each device can run
    expected          predicts which code a device would run for grouped products, without the device
    gemm              codes and checks that all products share
    operands          checks of the memory of tensors that kernels read and write
    registry          chooses the code of a grouped product: pmoe's kernels, torch's grouped_mm, or a loop
    grouped_gemm      grouped products: rows sorted by expert, each times the weight matrix of its expert
    scaled_products   grouped products of operands rounded to float8, by PyTorch's scaled_grouped_mm
    permute           copies tokens into the order of their experts, and sums the results of each token
    route             routing: softmax, top-k, rows of each expert, place of each row in the order of experts
    wire              messages of rows in narrower formats: packs them from tokens, unpacks them to rows
    counts            exchange of row counts: messages, agreed numbers, the order of arrived rows
    comet             COMET's fused kernels: dispatch + product, product + combine
    flashdmoe         FlashDMoE's kernels, which compute a whole forward or backward pass in one launch
    heap              device memory that other ranks write into while kernels of comet or flashdmoe run
    launch_order      lets launches that use the same heap wait for each other, also in CUDA graphs

`status` returns which kernels were built, which of them each device can run, and why it cannot run others.
"""

from pmoe.kernels.extension import status

__all__ = ["status"]
