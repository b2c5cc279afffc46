// Device memory that other ranks write into, from this process or from others of the node. comet/layout.h and
// flashdmoe/layout.h say what lies in it. A flag tests whether a peer reaches it. Plain C++: no CUDA header,
// no torch.
//
// Every function throws std::runtime_error if CUDA refuses, and std::invalid_argument for an impossible
// number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_info.h"

namespace pmoe::heap {

// Granularity in which other processes see memory. If an allocation shared a block of this size with a heap,
// other processes could access it too; so a heap fills whole blocks.
constexpr int64_t kBlockBytes = int64_t{2} << 20;

// Size of a handle, by which one process opens another one's memory.
constexpr int kHandleBytes = 64;

// Allocates zeroed memory, in whole blocks of its own. Waits for the device.
void* allocate(int device, int64_t bytes);
void release(int device, void* base);

// Returns the handle of memory from allocate().
std::string handle(int device, void* base);
// Maps the memory of another process, on the same device or on another one. That process must keep it until
// close().
void* open(int device, const std::string& handle);
void close(int device, void* peer);

// The two sides of one flag; each is a launch on a stream of its own.
//
// waited: receives the nanoseconds until the flag reached `wanted` (by signed difference), or -1 if it did
//     not within `bound` nanoseconds. The host reads it after the stream has finished.
void raise_flag(int device, void* stream, uint32_t* flag, uint32_t value);
void await_flag(int device, void* stream, const uint32_t* flag, uint32_t wanted, uint64_t bound,
                int64_t* waited);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::heap
