// Device memory that other ranks write into, in this process or in others of the node: what lies in it says
// comet/layout.h. And a flag, to try whether a peer reaches it. Plain C++: no CUDA header, no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_info.h"

namespace pmoe::heap {

// Other processes see memory in blocks of this size: what shares one with a heap, they could see, too.
constexpr int64_t kBlockBytes = int64_t{2} << 20;

// What a process gives to another one that is to open its memory.
constexpr int kHandleBytes = 64;

// All of them throw std::runtime_error where CUDA refuses, std::invalid_argument for numbers that cannot be.

// Zeroed, and whole: an allocation of CUDA's own, in blocks. Waits for the device.
void* allocate(int device, int64_t bytes);
void release(int device, void* base);

std::string handle(int device, void* base);
// Of another process, which must keep it until close(). May be on another device, or on the same one.
void* open(int device, const std::string& handle);
void close(int device, void* peer);

// The two sides of one flag, each a launch on a stream of its own. waited, which the host reads after the
// stream: nanoseconds until the flag had reached `wanted` (by signed difference), or -1 where it had not
// within `bound` nanoseconds.
void raise_flag(int device, void* stream, uint32_t* flag, uint32_t value);
void await_flag(int device, void* stream, const uint32_t* flag, uint32_t wanted, uint64_t bound,
                int64_t* waited);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::heap
