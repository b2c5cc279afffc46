// What forward and backward share: a warp's tokens, their rows of logits in registers, and the softmax.
// See layout.h for which lane holds what, and for the letters.
#pragma once
#include <cmath>

#include "common/device.cuh"
#include "route/layout.h"

// Before loops of few rounds: the compiler would unroll them, and a kernel of microseconds waits for its own
// code.
#if defined(__CUDACC__)
#define PMOE_ROLLED _Pragma("unroll 1")
#else
#define PMOE_ROLLED
#endif

namespace pmoe::route {

// The logits as a kernel reads them; dlogits lie likewise.
struct Rows {
  int64_t num_tokens;
  int32_t num_experts;
  bool whole_words;  // rows begin on 16 bytes, and are a multiple of 16 bytes long
};

// The threads that route.
template <class S>
__device__ __forceinline__ int own_thread() {
  if constexpr (S::kBarrier == 0)
    return static_cast<int>(threadIdx.x);
  else  // whose block does other things, too, and has no register for it
    return thread_again() - S::kFirstThread;
}
template <class S>
__device__ __forceinline__ void meet() {
  if constexpr (S::kBarrier == 0)
    sync_block();
  else
    sync_named(S::kBarrier, S::kThreads);
}

// Where a lane stands: which of its warp's kTokens tokens, and which of that token's kLanes lanes. block:
// whose tokens these are, of those that own some.
template <class S>
struct Place {
  int block = static_cast<int>(blockIdx.x);
  int lane = own_thread<S>() % 32;
  int warp = own_thread<S>() / 32;
  int of_token = lane % S::kLanes;
  int token = lane / S::kLanes;
};

// Sums and maxima over the lanes of a token; every lane gets the same bits.
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

// A lane's logits of a token: -inf where there is no such expert, 0 where there is no such token.
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

// numerator[j] = e^(x[j] - largest). A row with NaN, +inf, or -inf throughout gives NaN throughout, as torch
// does.
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
