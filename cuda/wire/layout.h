// The layout of messages, and the division of rows among warps. Host and device share this arithmetic, which
// accesses no memory. A message is the row of bytes in which a row is sent (pmoe/schedule/wire.py):
//
//   kBf16   M numbers of bf16
//   kE4m3   M numbers of e4m3, then a float32 scale for each block of 128 columns
//
// These kernels need an M that is a multiple of 4. So a message with scales begins on a multiple of 4 bytes,
// and a message without scales on a multiple of 8.
//
//   quad    4 neighbouring columns, which one lane of a warp has
//   block   128 columns, the 32 quads of a warp; the last block of a row may have fewer
//   slice   the 4 blocks of a row that one warp takes; the last slice of a row may have fewer
//
// Letters: M columns of a row, B blocks of a row.
#pragma once
#include <stdexcept>
#include <string>

#include "common/host_device.h"

namespace pmoe::wire {

enum class Format : int { kE4m3 = 0, kBf16 = 1 };

constexpr int kQuad = 4;
constexpr int kBlock = 32 * kQuad;
constexpr int kSliceBlocks = 4;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Returns the bytes of a message of M columns.
PMOE_HD constexpr int64_t message_bytes(Format format, int64_t columns) {
  return format == Format::kBf16 ? 2 * columns : columns + 4 * ceil_div(columns, kBlock);
}

// The division of rows among warps.
struct Cut {
  int32_t rows;
  int32_t columns;
  int32_t slices;  // number of slices of a row
  Divisor by_slices;

  PMOE_HD int32_t blocks() const { return ceil_div(rows * slices, kWarps); }

  // The row and the slice that a warp has. The row may be past the last row.
  struct Place {
    int32_t row, slice;
  };
  PMOE_HD Place place(int32_t block, int32_t thread) const {
    const int32_t at = block * kWarps + thread / 32;
    const int32_t row = by_slices.divide(at);
    return {row, at - row * slices};
  }

  // Returns the first column of a lane in one of the blocks of a slice. It may be past the last column.
  PMOE_HD int32_t column(int32_t slice, int32_t block, int32_t lane) const {
    return (slice * kSliceBlocks + block) * kBlock + lane * kQuad;
  }
};

// Returns the division of rows among warps.
//
// Throws std::invalid_argument if there is nothing to launch, or if it would take more than 2**31 - 1 warps.
inline Cut make_cut(int64_t rows, int64_t columns) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("pmoe._cuda: wire: " + what);
  };
  constexpr int64_t kMostWarps = (int64_t{1} << 31) - kThreads;
  if (columns < kQuad || columns % kQuad || columns > int64_t{1} << 30)
    refuse("columns (" + std::to_string(columns) + ") must be a multiple of 4, at most 2**30");
  const int64_t slices = ceil_div(columns, int64_t{kSliceBlocks * kBlock});
  if (rows < 1 || rows > kMostWarps / slices)
    refuse("rows (" + std::to_string(rows) + ") must be from 1 to " + std::to_string(kMostWarps / slices) +
           " with " + std::to_string(columns) + " columns");
  return {static_cast<int32_t>(rows), static_cast<int32_t>(columns), static_cast<int32_t>(slices),
          Divisor(static_cast<int>(slices))};
}

}  // namespace pmoe::wire
