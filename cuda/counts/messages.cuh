// Writes this rank's messages of row counts. Two kernels do so: pack_kernel (kernel.cuh), and the second
// kernel of the routing (route/place.cuh), if the header is known when a rank routes its tokens.
#pragma once
#include "common/device.cuh"
#include "counts/layout.h"

namespace pmoe::counts {

// Returns a number of the header. It is chosen by comparisons, because the compiler would copy an array that
// is indexed by a variable to the stack.
__device__ __forceinline__ int32_t header_at(const Pack& a, int32_t word) {
  int32_t value = a.fault == nullptr ? a.header[kFault] : static_cast<int32_t>(*a.fault);
  PMOE_UNROLL
  for (int i = 0; i < kHeader; ++i)
    if (i != kFault && word == i) value = a.header[i];
  return value;
}

// Writes the numbers `first`, `first + step`, `first + 2 * step` ... of all messages.
__device__ __forceinline__ void write_messages(const Pack& a, int32_t first, int32_t step) {
  const int32_t words = a.message.words(), experts = a.message.experts, ranks = a.message.ranks;
  const int32_t all = ranks * words;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int32_t i = first; i < all; i += step) {
    const int32_t rank = i / words, word = i % words;
    int32_t value;
    if (word < kHeader) {
      value = header_at(a, word);
    } else {
      const int32_t bin = (word - kHeader) / experts, expert = (word - kHeader) % experts;
      value = a.counts[(bin * ranks + rank) * experts + expert];
    }
    a.sent[i] = value;
  }
}

}  // namespace pmoe::counts
