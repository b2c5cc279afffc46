// The layout of operands in shared memory. An operand is stored in boxes; a box has lines of 64 elements of
// 16 bits, which are 128 bytes.
//
// The layout is the 128-byte swizzle of the tensor memory accelerator. A line is eight chunks of 16 bytes,
// and chunk c of line i is stored as the line's chunk number c ^ (i % 8):
//
//   line 0   0 1 2 3 4 5 6 7
//   line 1   1 0 3 2 5 4 7 6
//   line 2   2 3 0 1 6 7 4 5
//   ...
//
// So the same chunk of eight successive lines lies in eight different groups of banks, and reading a column
// of chunks causes no bank conflict. A box begins at a multiple of 1024 bytes.
#pragma once
#include "common/host_device.h"

namespace pmoe {

constexpr int kBoxColumns = 64;
constexpr int kLineBytes = 128;
constexpr int kChunks = 8;  // chunks of a line, 8 elements each

PMOE_HD constexpr int box_bytes(int lines) { return lines * kLineBytes; }

// Returns the byte offset in a box of one 16-byte chunk of a line.
PMOE_HD constexpr int chunk_offset(int line, int chunk) {
  return line * kLineBytes + ((chunk ^ (line & 7)) << 4);
}

}  // namespace pmoe
