// Rows gathered into boxes of shared memory, 16 bytes a thread and copy. Hopper's tensor memory accelerator
// cannot gather, so this is how rows are gathered on every device, and how the sm_80 path loads all operands.
#pragma once
#include "box.h"
#include "common/device.cuh"

namespace pmoe {

// kThreads threads fill boxes of kLines lines; a thread has the same chunk of every line that is its own.
template <int kThreads, int kLines>
struct BoxCopy {
  static constexpr int kLinesAtOnce = kThreads / kChunks;
  static constexpr int kPerThread = kLines / kLinesAtOnce;
  static_assert(kPerThread * kLinesAtOnce == kLines, "whole lines");

  int chunk, first_line;

  __device__ __forceinline__ explicit BoxCopy(int thread)
      : chunk(thread % kChunks), first_line(thread / kChunks) {}

  PMOE_HD int line(int i) const { return first_line + i * kLinesAtOnce; }

  // source[i]: the row of line(i), negative for a line of zeros. Columns from `column` on; those at `columns`
  // and beyond are zeros. columns and stride are multiples of 8 elements.
  template <class T>
  __device__ __forceinline__ void copy(void* box, const void* base, int64_t stride,
                                       const int32_t (&source)[kPerThread], int column, int columns) const {
    const int own = column + chunk * 8;
    PMOE_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      const bool valid = source[i] >= 0 && own < columns;
      const T* from = static_cast<const T*>(base) + (valid ? int64_t{source[i]} * stride + own : 0);
      cp_async16(static_cast<uint8_t*>(box) + chunk_offset(line(i), chunk), from, valid);
    }
  }
};

// Which row of an operand stands for row r of the N: r itself, or the token of its slot.
__device__ __forceinline__ int32_t source_row(const int32_t* slot, int top_k, int64_t r) {
  if (slot == nullptr) return static_cast<int32_t>(r);
  const int32_t s = read(slot + r);
  return top_k == 1 ? s : s / top_k;
}

}  // namespace pmoe
