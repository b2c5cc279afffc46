// Kernels of pass programs that move single numbers: routing weights, and their gradients. Rows are moved by
// the kernels of cuda/permute, whose rows are multiples of 16 bytes.
#pragma once
#include "common/device.cuh"
#include "program/launch.h"

namespace pmoe::program {

constexpr int kThreads = 256;

// The loops of all blocks together go over `count` numbers; a thread begins at first_number() and goes on by
// step_of_grid().
__device__ __forceinline__ int64_t first_number() {
  return int64_t{blockIdx.x} * kThreads + static_cast<int64_t>(threadIdx.x);
}
__device__ __forceinline__ int64_t step_of_grid() { return int64_t{gridDim.x} * kThreads; }

// out[i] = source[index[i]]
__global__ void __launch_bounds__(kThreads)
    take_kernel(const float* source, const int32_t* index, float* out, int64_t count) {
  for (int64_t i = first_number(); i < count; i += step_of_grid()) out[i] = source[index[i]];
}

// out[index[i]] = source[i]
__global__ void __launch_bounds__(kThreads)
    put_kernel(const float* source, const int32_t* index, float* out, int64_t count) {
  for (int64_t i = first_number(); i < count; i += step_of_grid()) out[index[i]] = source[i];
}

// For both members of `of`: out[i] = the sum over p of parts[p * count + i], added in the order of p.
struct PairOfSums {
  PartialSums of[2];
};
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(const PairOfSums sums, int32_t num_parts) {
  PMOE_UNROLL
  for (int which = 0; which < 2; ++which) {
    const PartialSums& own = sums.of[which];
    for (int64_t i = first_number(); i < own.count; i += step_of_grid()) {
      float sum = 0.0f;
      for (int32_t p = 0; p < num_parts; ++p) sum += own.parts[p * own.count + i];
      own.out[i] = sum;
    }
  }
}

}  // namespace pmoe::program
