// Copies and sums of rows by the lanes of a warp. A lane handles 16 bytes at a time.
#pragma once
#include "common/device.cuh"
#include "common/scalar.h"

namespace pmoe::peers {

// A team of threads that works on the same rows: the lanes of a warp. In tests with one thread for each warp,
// a team is one thread.
struct WarpTeam {
  int lane, lanes;
  int number, count;  // index of this team among the rank's teams that communicate, and how many teams do
};

// Number of 16-byte vectors that a lane loads before it stores the first one.
constexpr int kInFlight = 8;

// Copies a row. All lanes of a team call this function.
//
// bytes: size of the row, a multiple of 16.
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes,
                                         const WarpTeam& team) {
  const int vectors = static_cast<int>(bytes / 16);
  for (int first = team.lane; first < vectors; first += kInFlight * team.lanes) {
    // `loaded` is initialised, because the compiler would otherwise reserve registers for it during all other
    // work of the block.
    Words loaded[kInFlight] = {};
    PMOE_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * team.lanes;
      if (at < vectors) loaded[i] = load16(from + int64_t{at} * 16);
    }
    PMOE_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      const int at = first + i * team.lanes;
      if (at < vectors) store16(to + int64_t{at} * 16, loaded[i]);
    }
  }
}

// Adds eight values of the 16-bit type T, packed in `v`, to eight float sums.
template <class T>
__device__ __forceinline__ void add_vector(float (&sum)[8], const Words& v) {
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += low_half<T>(v.word[i]);
    sum[2 * i + 1] += high_half<T>(v.word[i]);
  }
}

// Rounds eight float sums to the 16-bit type T, and packs them.
template <class T>
__device__ __forceinline__ Words round_vector(const float (&sum)[8]) {
  Words v;
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) v.word[i] = pack2<T>(sum[2 * i], sum[2 * i + 1]);
  return v;
}

}  // namespace pmoe::peers
