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

// Which rows of an operand stand for kCount of the N, a group's lines line(i): those of group_rows and more
// are -1. slot is null where rows stand for themselves, else a row stands for its slot's token.
template <int kCount, class Line>
__device__ __forceinline__ void find_sources(const int32_t* slot, const Divisor& top_k, int group_begin,
                                             int group_rows, const Line& line, int32_t (&source)[kCount]) {
  // All loads are on their way, none behind a branch, before the first is waited for.
  PMOE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    source[i] = group_begin + smaller(line(i), group_rows - 1);
    if (slot != nullptr) source[i] = read(slot + source[i]);
  }
  PMOE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (slot != nullptr) source[i] = top_k.divide(source[i]);
    if (line(i) >= group_rows) source[i] = -1;
  }
}

}  // namespace pmoe
