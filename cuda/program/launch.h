// Launches of the kernels in kernel.cuh on the current device. This header is plain C++: no CUDA header, no
// torch. Launches return without waiting, and throw std::runtime_error for an error of CUDA. All addresses
// are of device memory. `count` is at least 1.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_info.h"

namespace pmoe::program {

// out[i] = source[index[i]] for `count` numbers.
void take_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count);

// out[index[i]] = source[i] for `count` numbers.
void put_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count);

// out[i] = the sum over p of parts[p * count + i], for `count` numbers.
void sum_parts(void* stream, const float* parts, int num_parts, float* out, int64_t count);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::program
