// Kernels of pass programs: those that move single numbers (routing weights, and their gradients), and those
// of experts with biases. The kernels of cuda/permute move rows, but cannot move single numbers: their rows
// must be multiples of 16 bytes.
#pragma once
#include "common/device.cuh"
#include "common/scalar.h"
#include "program/launch.h"

namespace pmoe::program {

constexpr int kThreads = 256;

// The threads of all blocks share a loop over `count` numbers: each thread begins at first_number(), and goes
// on in steps of step_of_grid().
__device__ __forceinline__ int64_t first_number() {
  return int64_t{blockIdx.x} * kThreads + static_cast<int64_t>(threadIdx.x);
}
__device__ __forceinline__ int64_t step_of_grid() { return int64_t{gridDim.x} * kThreads; }

// out[i] = source[index[i]], and cleared[i] = 0
__global__ void __launch_bounds__(kThreads)
    take_kernel(const float* source, const int32_t* index, float* out, int64_t count, uint32_t* cleared,
                int32_t num_cleared) {
  for (int64_t i = first_number(); i < count; i += step_of_grid()) out[i] = source[index[i]];
  for (int64_t i = first_number(); i < num_cleared; i += step_of_grid()) cleared[i] = 0;
}

// out[index[i]] = source[i]
__global__ void __launch_bounds__(kThreads)
    put_kernel(const float* source, const int32_t* index, float* out, int64_t count) {
  for (int64_t i = first_number(); i < count; i += step_of_grid()) out[index[i]] = source[i];
}

// ---- experts with biases. A word is two neighbouring numbers of a row, of 16 bits each

constexpr int kWarp = 32;
constexpr int kRowsAtATime = kThreads / kWarp;  // of bias_gradient_kernel: one for each warp of a block

// dots[r] += <grad[r], bias of the row's expert>. A warp goes through the words of a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    bias_dots_kernel(const RowsByExpert grad, const uint32_t* bias, float* dots) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t row = first_number() / kWarp; row < grad.rows; row += step_of_grid() / kWarp) {
    int expert = 0;
    while (expert < grad.experts && row >= grad.ends[expert]) ++expert;
    float sum = 0.0f;
    for (int64_t i = lane; i < grad.words && expert < grad.experts; i += kWarp) {
      const uint32_t a = grad.data[row * grad.words + i];
      const uint32_t b = bias[expert * grad.words + i];
      sum = fmaf(low_half<T>(a), low_half<T>(b), sum);
      sum = fmaf(high_half<T>(a), high_half<T>(b), sum);
    }
    PMOE_UNROLL
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += shfl_xor(sum, distance);
    if (lane == 0) dots[row] += sum;
  }
}

// grad[r] *= weight[r]
template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const float* weight, uint32_t* grad, int64_t words, int64_t count) {
  for (int64_t i = first_number(); i < count; i += step_of_grid()) {
    const float own = weight[i / words];
    grad[i] = pack2<T>(low_half<T>(grad[i]) * own, high_half<T>(grad[i]) * own);
  }
}

// total[e] = the sum of the rows of expert e, or total[e] += this sum if `adds`. Block b of an expert sums
// the words 32 b to 32 b + 31 of its rows. Each warp of a block sums every 8th row, and the first warp then
// adds up the sums of the warps, in the order of the warps.
template <class T>
__global__ void __launch_bounds__(kThreads)
    bias_gradient_kernel(const RowsByExpert grad, float* total, int32_t adds) {
  auto* const sums = reinterpret_cast<float*>(shared_memory());  // (warps, 32 words, 2)
  const int64_t blocks = ceil_div(grad.words, int64_t{kWarp});
  const int expert = static_cast<int>(blockIdx.x / blocks);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t word = blockIdx.x % blocks * kWarp + lane;
  float low = 0.0f;
  float high = 0.0f;
  if (word < grad.words) {
    const int32_t begin = expert ? grad.ends[expert - 1] : 0;
    for (int64_t row = begin + warp; row < grad.ends[expert]; row += kRowsAtATime) {
      const uint32_t value = grad.data[row * grad.words + word];
      low += low_half<T>(value);
      high += high_half<T>(value);
    }
  }
  sums[2 * threadIdx.x] = low;
  sums[2 * threadIdx.x + 1] = high;
  sync_block();
  if (warp > 0 || word >= grad.words) return;
  for (int other = 1; other < kRowsAtATime; ++other) {
    low += sums[2 * (other * kWarp + lane)];
    high += sums[2 * (other * kWarp + lane) + 1];
  }
  float* const out = total + 2 * (expert * grad.words + word);
  out[0] = adds ? out[0] + low : low;
  out[1] = adds ? out[1] + high : high;
}

// ---- partial sums

// For each of the two lists: out[i] = the sum over p of parts[p * count + i], added in the order of p.
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
