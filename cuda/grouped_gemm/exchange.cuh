// Between the two layouts of a warp's 16 rows x 64 columns of 16-bit values: fragments, as matrix
// instructions leave and take them, and rows, of which a lane has 16 bytes and eight lanes 128 neighbouring
// bytes, as memory wants them. Through 2 KiB of shared memory of the warp's own, a swizzled box of 16 lines
// (box.h): neither way meets a bank twice.
//
//   fragments: word[2 j + h] of lane l: row l / 4 + 8 h, columns 8 j + 2 (l % 4) + {0, 1}; j in 0..7
//   rows:      lane l has of row l / 8 + 4 i chunk l % 8, that is columns 8 (l % 8) + 0..7; i in 0..3
#pragma once
#include "box.h"
#include "common/device.cuh"

namespace pmoe {

constexpr int kExchangeBytes = box_bytes(16);

// kByMatrix: fragments are stored by stmatrix, which Hopper has; else word by word.
template <bool kByMatrix>
class Exchange {
 public:
  __device__ __forceinline__ Exchange(void* buffer, int lane)
      : buffer_(static_cast<uint8_t*>(buffer)), lane_(lane) {}

  // The row of the 16, and the first column of the 64, of what the lane has i-th.
  __device__ __forceinline__ int row(int i) const { return lane_ / 8 + 4 * i; }
  __device__ __forceinline__ int column() const { return lane_ % 8 * 8; }

  __device__ __forceinline__ void to_rows(const uint32_t (&word)[16], Words (&rows)[4]) const {
    sync_warp();  // whoever still reads what was here before
    if constexpr (kByMatrix) {
      PMOE_UNROLL
      for (int j = 0; j < 8; j += 2) {
        const uint32_t four[4] = {word[2 * j], word[2 * j + 1], word[2 * j + 2], word[2 * j + 3]};
        stmatrix_x4(of_matrix(j), four);
      }
    } else {
      PMOE_UNROLL
      for (int i = 0; i < 16; ++i) {
        uint8_t* chunk = buffer_ + chunk_offset(lane_ / 4 + i % 2 * 8, i / 2);
        write(reinterpret_cast<uint32_t*>(chunk) + lane_ % 4, word[i]);
      }
    }
    sync_warp();
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i) rows[i] = load16(of_row(i));
  }

  __device__ __forceinline__ void to_fragments(const Words (&rows)[4], uint32_t (&word)[16]) const {
    sync_warp();
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i) store16(of_row(i), rows[i]);
    sync_warp();
    PMOE_UNROLL
    for (int j = 0; j < 8; j += 2) {
      uint32_t four[4];
      ldmatrix_x4(four, of_matrix(j));
      PMOE_UNROLL
      for (int i = 0; i < 4; ++i) word[2 * j + i] = four[i];
    }
  }

  // Places in the buffer are worked out anew from here on, and not kept in registers.
  __device__ __forceinline__ void forget_places() { forget(lane_); }

 private:
  __device__ __forceinline__ uint8_t* of_row(int i) const {
    return buffer_ + chunk_offset(row(i), lane_ % 8);
  }

  // Four matrices of 8 x 8: fragments j and j + 1 of both halves of the rows. The lane's line of them.
  __device__ __forceinline__ uint8_t* of_matrix(int j) const {
    const int matrix = lane_ / 8;
    return buffer_ + chunk_offset(matrix % 2 * 8 + lane_ % 8, j + matrix / 2);
  }

  uint8_t* buffer_;
  int lane_;
};

}  // namespace pmoe
