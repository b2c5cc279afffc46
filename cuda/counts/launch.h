// Launches of the kernels in kernel.cuh. This header is plain C++: no CUDA header, no torch. Launches return
// without waiting. All addresses are of device memory.
#pragma once

#include <cstdint>
#include <vector>

#include "counts/layout.h"
#include "kernel_info.h"

namespace pmoe::counts {

// Each launch function throws std::invalid_argument, before launching, for sizes that the kernels do not
// take, and std::runtime_error for an error of CUDA.

// Writes this rank's messages to all ranks.
void pack(int device, void* stream, const Pack& arguments);

// Computes what ranks must agree on from the messages that arrived.
void agree(int device, void* stream, const Agree& arguments);

// Computes the orders of rows and of their routing weights, and where the rows of each expert end.
void order(int device, void* stream, const Order& arguments);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::counts
