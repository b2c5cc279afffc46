// Heaps: device memory that other ranks write into, from this process or from other processes of the node.
// comet/layout.h and flashdmoe/layout.h describe the content of a heap. raise_flag() and await_flag() test
// whether another rank can write to it. This header is plain C++: no CUDA header, no torch.
//
// Every function throws std::runtime_error if CUDA refuses, and std::invalid_argument for an impossible
// number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_info.h"

namespace pmoe::heap {

// Bytes of a block, the unit in which CUDA shares memory between processes. A heap fills whole blocks,
// because other processes could access any other allocation in the same block.
constexpr int64_t kBlockBytes = int64_t{2} << 20;

// Size in bytes of a handle, with which a process opens the memory of another process.
constexpr int kHandleBytes = 64;

// Allocates zeroed memory, in whole blocks of kBlockBytes. The host waits for the device.
void* allocate(int device, int64_t bytes);
void release(int device, void* base);

// Returns the handle of memory from allocate(), for other processes to open it.
std::string handle(int device, void* base);
// Maps the memory of another process, on the same device or on another one, and returns its address here. The
// other process must keep the memory until close().
void* open(int device, const std::string& handle);
void close(int device, void* peer);

// raise_flag() launches a kernel that writes `value` to a flag. await_flag() launches a kernel that waits
// until a flag has reached `wanted`. Values of a flag are compared by their signed difference, so they may
// wrap around.
//
// bound: the longest wait, in nanoseconds.
// waited: receives the nanoseconds until the flag reached `wanted`, or -1 if the wait exceeded `bound`. The
//     host may read it after the stream has finished.
void raise_flag(int device, void* stream, uint32_t* flag, uint32_t value);
void await_flag(int device, void* stream, const uint32_t* flag, uint32_t wanted, uint64_t bound,
                int64_t* waited);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::heap
