// Boxes of shared memory: lines of 64 elements of 16 bits, 128 bytes, in the layout that the tensor memory
// accelerator calls a 128-byte swizzle: within 8 lines (1024 bytes) the eight 16-byte chunks of line i are
// exchanged by i. A column of chunks so lies in eight different groups of banks. Boxes begin on 1024 bytes.
#pragma once
#include "common/host_device.h"

namespace pmoe {

constexpr int kBoxColumns = 64;
constexpr int kLineBytes = 128;
constexpr int kChunks = 8;  // of a line, 8 elements each

PMOE_HD constexpr int box_bytes(int lines) { return lines * kLineBytes; }

// Byte offset of a chunk in its box.
PMOE_HD constexpr int chunk_offset(int line, int chunk) {
  return line * kLineBytes + ((chunk ^ (line & 7)) << 4);
}

}  // namespace pmoe
