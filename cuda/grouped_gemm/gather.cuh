// Gathers rows of memory into boxes of shared memory (box.h). A thread copies 16 bytes at a time.
//
// Hopper's tensor memory accelerator cannot gather rows by an index, so this code copies gathered rows on
// every device. The implementation for sm_80 uses it to load all operands.
#pragma once
#include "box.h"
#include "common/device.cuh"

namespace pmoe {

// Lets kThreads threads fill boxes of kLines lines. A thread has several lines, and copies one 16-byte chunk
// of each of them, always the chunk with the same index.
template <int kThreads, int kLines>
struct BoxCopy {
  static constexpr int kLinesAtOnce = kThreads / kChunks;
  static constexpr int kPerThread = kLines / kLinesAtOnce;
  static_assert(kPerThread * kLinesAtOnce == kLines, "whole lines");

  int chunk, first_line;

  __device__ __forceinline__ explicit BoxCopy(int thread)
      : chunk(thread % kChunks), first_line(thread / kChunks) {}

  PMOE_HD int line(int i) const { return first_line + i * kLinesAtOnce; }

  // Starts the copies of this thread.
  //
  // source: (kPerThread,) the row of memory for line(i); negative for a line of zeros.
  // column: the first column to copy. Columns from `columns` on become zeros.
  // columns, stride: in elements, multiples of 8.
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

// Finds, for kCount of the N sorted rows, the row of the operand in which the sorted row lies.
//
// slot: (N,) the (token, choice) slot of each sorted row, which lies in row slot / top_k of the operand, its
//     token. Null if rows are not gathered: sorted row i then lies in row i of the operand.
// group_begin, group_rows: the index of the expert's first sorted row, and the number of its rows.
// line: line(i) returns the index, among the expert's rows, of the i-th row that is needed.
// source: (kCount,) result: indices of rows of the operand; -1 where line(i) is beyond the expert's rows.
template <int kCount, class Line>
__device__ __forceinline__ void find_sources(const int32_t* slot, const Divisor& top_k, int group_begin,
                                             int group_rows, const Line& line, int32_t (&source)[kCount]) {
  // All loads are started before the first result is used, and none is behind a branch, so that they overlap.
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
