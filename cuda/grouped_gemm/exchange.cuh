// Converts a warp's 16 rows x 64 columns of 16-bit values between two layouts:
//
//   fragments   the layout in which matrix instructions produce and take values. word[2 j + h] of lane l,
//               with j in 0..7 and h in 0..1, has row l / 4 + 8 h, columns 8 j + 2 (l % 4) + {0, 1}
//   rows        the layout in which memory is accessed: eight lanes have 128 neighbouring bytes. rows[i] of
//               lane l, with i in 0..3, has row l / 8 + 4 i, columns 8 (l % 8) + 0..7
//
// The values pass through 2 KiB of shared memory that only this warp uses, a swizzled box of 16 lines
// (box.h). Neither direction has bank conflicts.
#pragma once
#include "box.h"
#include "common/device.cuh"

namespace pmoe {

constexpr int kExchangeBytes = box_bytes(16);

// kByMatrix: whether fragments are written to shared memory by stmatrix, an instruction of Hopper. If not,
//     they are written word by word.
template <bool kByMatrix>
class Exchange {
 public:
  static constexpr bool kStoresBoxes = false;  // Boxes of boxes.cuh store without registers

  __device__ __forceinline__ Exchange(void* buffer, int lane)
      : buffer_(static_cast<uint8_t*>(buffer)), lane_(lane) {}

  // In the layout "rows", this lane has four vectors of 16 bytes. row() returns the row (0 to 15) of the i-th
  // vector, column() the first column (0 to 63) of all four.
  __device__ __forceinline__ int row(int i) const { return lane_ / 8 + 4 * i; }
  __device__ __forceinline__ int column() const { return lane_ % 8 * 8; }

  __device__ __forceinline__ void to_rows(const uint32_t (&word)[16], Words (&rows)[4]) const {
    // Other lanes may still be reading the previous content of the buffer.
    sync_warp();
    if constexpr (kByMatrix) {
      write_matrices(word, 0);
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

  // Makes the compiler compute addresses in the buffer once more after this call, instead of keeping them in
  // registers.
  __device__ __forceinline__ void recompute_addresses() { make_opaque(lane_); }

  // Writes fragments to the box of 16 lines that begins `offset` bytes after the buffer.
  __device__ __forceinline__ void write_matrices(const uint32_t (&word)[16], int offset) const {
    PMOE_UNROLL
    for (int j = 0; j < 8; j += 2) {
      const uint32_t four[4] = {word[2 * j], word[2 * j + 1], word[2 * j + 2], word[2 * j + 3]};
      stmatrix_x4(of_matrix(j) + offset, four);
    }
  }

  __device__ __forceinline__ int lane() const { return lane_; }
  __device__ __forceinline__ uint8_t* buffer() const { return buffer_; }

 private:
  __device__ __forceinline__ uint8_t* of_row(int i) const {
    return buffer_ + chunk_offset(row(i), lane_ % 8);
  }

  // Returns the address that this lane passes to ldmatrix or stmatrix for four 8 x 8 matrices: columns 8 j to
  // 8 j + 15 of all 16 rows.
  __device__ __forceinline__ uint8_t* of_matrix(int j) const {
    const int matrix = lane_ / 8;
    return buffer_ + chunk_offset(matrix % 2 * 8 + lane_ % 8, j + matrix / 2);
  }

  uint8_t* buffer_;
  int lane_;
};

}  // namespace pmoe
