// In backward, two matrix products compute the gradients of the tokens and of the gate's weight from the
// gradient of the logits. The kernel of this file writes operands of these products in bfloat16.
//
// The gradient of the logits is float32. It is replaced by the sum of two bfloat16 numbers, upper + lower,
// which differs from it by at most 2^-17 of its value:
//
//   upper = bf16(grad)    lower = bf16(grad - upper)
//
// For T tokens, E experts and M columns it writes
//
//   halves (T, 2E)   the upper numbers of a token in columns 0 .. E - 1, the lower numbers in E .. 2E - 1
//   twice (2E, M)    the gate's weight (E, M), twice: halves @ twice is the gradient of the tokens
#pragma once
#include "common/device.cuh"
#include "common/scalar.h"

namespace pmoe::route {

// The kernel's arguments. The addresses `weight` and `twice`, and the bytes of the weight, are multiples of
// 16.
struct Halves {
  int32_t num_experts;
  uint32_t gradients;       // T * E
  uint32_t weight_vectors;  // number of 16-byte vectors of the weight
  const float* grad_TE;
  bf16* halves;
  const uint8_t* weight;
  uint8_t* twice;
};

constexpr int kHalvesThreads = 256;

__global__ void __launch_bounds__(kHalvesThreads) halves_kernel(const __grid_constant__ Halves a) {
  const uint32_t step = gridDim.x * kHalvesThreads, first = blockIdx.x * kHalvesThreads + threadIdx.x;
  const auto experts = static_cast<uint32_t>(a.num_experts);
  for (uint32_t i = first; i < a.gradients; i += step) {
    const float grad = a.grad_TE[i];
    const bf16 upper = narrow<bf16>(grad);
    bf16* const at = a.halves + int64_t{i / experts} * 2 * experts + i % experts;
    at[0] = upper;
    at[experts] = narrow<bf16>(grad - Scalar<bf16>::widen(upper));
  }
  for (uint32_t i = first; i < a.weight_vectors; i += step) {
    const Words words = load16(a.weight + int64_t{i} * 16);
    store16(a.twice + int64_t{i} * 16, words);
    store16(a.twice + (int64_t{a.weight_vectors} + i) * 16, words);
  }
}

}  // namespace pmoe::route
