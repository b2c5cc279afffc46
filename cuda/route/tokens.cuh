// Code that the forward and backward kernels share: a warp's tokens, their logits in registers, the softmax.
// layout.h says which lane has which experts, and explains the letters.
#pragma once
#include <cmath>

#include "common/device.cuh"
#include "route/layout.h"

// Marks loops with few iterations that must not be unrolled. An unrolled loop is longer code, and in a kernel
// that runs for a few microseconds, loading that code would take most of the time.
#if defined(__CUDACC__)
#define PMOE_ROLLED _Pragma("unroll 1")
#else
#define PMOE_ROLLED
#endif

namespace pmoe::route {

// The sizes and alignment of the logits, which have one row for each token. The gradient of the logits has
// the same sizes and alignment.
struct Rows {
  int64_t num_tokens;
  int32_t num_experts;
  bool whole_words;  // whether address and length of each row are multiples of 16 bytes
};

// own_thread() returns the index of this thread among the threads that do the routing. sync() is a barrier of
// these threads. In FlashDMoE's kernels, only some threads of a block do the routing.
template <class S>
__device__ __forceinline__ int own_thread() {
  if constexpr (S::kBarrier == 0) return static_cast<int>(threadIdx.x);
  // FlashDMoE's kernels have no free register for the thread's index, so it is read again at each call.
  else
    return thread_again() - S::kFirstThread;
}
template <class S>
__device__ __forceinline__ void sync() {
  if constexpr (S::kBarrier == 0)
    sync_block();
  else
    sync_named(S::kBarrier, S::kThreads);
}

// The position of a thread. A warp works on kTokens tokens at a time, with kLanes lanes for each.
//
//   block      index of the thread's block among the blocks that have tokens
//   warp       index of the thread's warp in the block
//   lane       index of the thread in the warp
//   token      index of the thread's token among the warp's kTokens tokens
//   of_token   index of the thread among the kLanes lanes of this token
template <class S>
struct Place {
  int block = static_cast<int>(blockIdx.x);
  int lane = own_thread<S>() % 32;
  int warp = own_thread<S>() / 32;
  int of_token = lane % S::kLanes;
  int token = lane / S::kLanes;
};

// token_sum() and token_max() return the sum and the maximum over the lanes of a token. Every lane gets the
// same bits.
template <class S>
__device__ __forceinline__ float token_sum(float value) {
  PMOE_UNROLL
  for (int mask = 1; mask < S::kLanes; mask *= 2) value += shfl_xor(value, mask);
  return value;
}

template <class S>
__device__ __forceinline__ float token_max(float value) {
  PMOE_UNROLL
  for (int mask = 1; mask < S::kLanes; mask *= 2) value = fmaxf(value, shfl_xor(value, mask));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  PMOE_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) value += shfl_xor(value, mask);
  return value;
}

// Loads the logits of one token for this lane's experts: -inf for an expert that does not exist, 0 for a
// token that does not exist.
template <class S>
__device__ __forceinline__ void load_row(const float* logits_TE, const Rows& rows, int64_t token, bool valid,
                                         int of_token, float (&x)[S::kPer]) {
  const float* const row = logits_TE + token * rows.num_experts;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; j += 4) {
    const int e = S::expert(of_token, j);
    if (valid && rows.whole_words && e < rows.num_experts) {
      const Words four = load16(row + e);
      PMOE_UNROLL
      for (int i = 0; i < 4; ++i) x[j + i] = float_of(four.word[i]);
      continue;
    }
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i) x[j + i] = e + i < rows.num_experts ? (valid ? row[e + i] : 0.0f) : -INFINITY;
  }
}

template <class S>
__device__ __forceinline__ void store_row(float* out_TE, const Rows& rows, int64_t token, int of_token,
                                          const float (&x)[S::kPer]) {
  float* const row = out_TE + token * rows.num_experts;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; j += 4) {
    const int e = S::expert(of_token, j);
    if (rows.whole_words) {
      if (e < rows.num_experts)
        store16(row + e, {{bits_of(x[j]), bits_of(x[j + 1]), bits_of(x[j + 2]), bits_of(x[j + 3])}});
      continue;
    }
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (e + i < rows.num_experts) row[e + i] = x[j + i];
  }
}

struct Softmax {
  float largest;
  float sum;

  __device__ float log_sum() const { return largest + logf(sum); }
};

// Computes numerator[j] = e^(x[j] - largest), and the sum over the numerators of all experts. If the logits
// contain NaN or +inf, or are all -inf, all probabilities are NaN, as in torch.
template <class S>
__device__ __forceinline__ Softmax softmax(const float (&x)[S::kPer], float (&numerator)[S::kPer]) {
  float most = x[0];
  PMOE_UNROLL
  for (int j = 1; j < S::kPer; ++j) most = fmaxf(most, x[j]);
  most = token_max<S>(most);
  float sum = 0.0f;
  PMOE_UNROLL
  for (int j = 0; j < S::kPer; ++j) {
    numerator[j] = expf(x[j] - most);
    sum += numerator[j];
  }
  return {most, token_sum<S>(sum)};
}

}  // namespace pmoe::route
