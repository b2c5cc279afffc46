// Sizes that are the same for the heaps and the launches of all fused kernels.
#pragma once
#include "common/host_device.h"

namespace pmoe::peers {

// Largest number of ranks in a launch. A launch normally has one rank. In tests and measurements a process
// runs several ranks on one device in the same launch.
constexpr int kMostVirtual = 4;

constexpr int kFlagBytes = 32;  // a flag that is polled has a 32-byte sector of its own

// Rounds up to a multiple of 1024, the alignment of every region of a heap.
PMOE_HD constexpr int64_t align_region(int64_t bytes) { return ceil_div(bytes, 1024) * 1024; }

}  // namespace pmoe::peers
