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

// Partial sums of `count` numbers, and memory for their sums; a count of 0 for none.
struct PartialSums {
  const float* parts;  // (number of parts, count)
  float* out;          // (count,)
  int64_t count;
};

// Adds up one or two lists of partial sums, in one launch. The first one's count is at least 1.
void sum_parts(void* stream, int num_parts, const PartialSums& first, const PartialSums& second);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::program
