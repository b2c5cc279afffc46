// Sizes that are the same for the heaps and the launches of all fused kernels.
#pragma once
#include "common/host_device.h"

namespace pmoe::peers {

// Largest number of ranks in a launch. It is normally one; in tests and measurements several virtual ranks
// share a device. Which blocks belong to which rank differs between the kernels.
constexpr int kMostVirtual = 4;

constexpr int kFlagBytes = 32;  // a flag that is polled has a 32-byte sector of its own

// Rounds up to a multiple of 1024, the alignment of every region of a heap.
PMOE_HD constexpr int64_t align_region(int64_t bytes) { return ceil_div(bytes, 1024) * 1024; }

}  // namespace pmoe::peers
