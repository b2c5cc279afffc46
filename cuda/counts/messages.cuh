// Writes this rank's messages of row counts. Two kernels do so: pack_kernel (kernel.cuh), and the second
// kernel of the routing (route/place.cuh), if the header is known when a rank routes its tokens.
#pragma once
#include "common/device.cuh"
#include "counts/layout.h"

namespace pmoe::counts {

// Returns the number at index `word` of the header. It is chosen by comparisons: if a variable indexed the
// array, the compiler would copy the array to the stack.
__device__ __forceinline__ int32_t header_at(const Pack& a, int32_t word) {
  int32_t value = a.fault == nullptr ? a.header[kFault] : static_cast<int32_t>(*a.fault);
  PMOE_UNROLL
  for (int i = 0; i < kHeader; ++i)
    if (i != kFault && word == i) value = a.header[i];
  return value;
}

// Writes the numbers with the indices first, first + step, first + 2 * step, ... among the numbers of all
// messages. Each thread of a kernel calls this function with an index of its own as `first`.
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
