// Kernels that write rows into messages of a narrower number format, and read rows from messages. The bytes
// and values are those of pmoe/comm/wire.py on a CPU, to the bit. Only a NaN may have other bits.
//
// A warp takes a slice of a row (layout.h). In each block of 128 columns, each of its 32 lanes has 4
// neighbouring columns. So a block belongs to one warp, which computes the block's scale:
//
//   scale = max(largest absolute value in the block / 448, 2^-126)
//   number = value / scale, rounded to e4m3
//   unpacked value = number * scale, rounded to the row's type
//
// Letters: T tokens, K choices, N messages, M columns.
#pragma once
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "common/device.cuh"
#include "common/e4m3.h"
#include "common/scalar.h"
#include "wire/layout.h"

namespace pmoe::wire {

// Rows, or messages, in memory.
struct Rows {
  uint8_t* base;
  int64_t stride_bytes;

  PMOE_HD uint8_t* at(int64_t row, int64_t byte) const { return base + row * stride_bytes + byte; }
};

// ---- 4 neighbouring numbers of a row

template <class T>
using Quad = std::conditional_t<sizeof(T) == 4, Words, Pair>;

template <class T>
PMOE_HD void widen_quad(const Quad<T>& quad, float (&value)[kQuad]) {
  if constexpr (sizeof(T) == 4) {
    PMOE_UNROLL
    for (int i = 0; i < kQuad; ++i) value[i] = float_of(quad.word[i]);
  } else {
    PMOE_UNROLL
    for (int i = 0; i < 2; ++i) {
      value[2 * i] = low_half<T>(quad.word[i]);
      value[2 * i + 1] = high_half<T>(quad.word[i]);
    }
  }
}

template <class T>
PMOE_HD Quad<T> narrow_quad(const float (&value)[kQuad]) {
  Quad<T> quad;
  if constexpr (sizeof(T) == 4) {
    PMOE_UNROLL
    for (int i = 0; i < kQuad; ++i) quad.word[i] = bits_of(value[i]);
  } else {
    PMOE_UNROLL
    for (int i = 0; i < 2; ++i) quad.word[i] = pack2<T>(value[2 * i], value[2 * i + 1]);
  }
  return quad;
}

// ---- rows to messages

// The arguments of pack_kernel.
struct Pack {
  Cut cut;  // of the T tokens
  Rows tokens;
  Rows messages;
  const int32_t* position;  // (T, K), the message of each choice; if it is null, token t has message t
  int32_t choices;
  uint32_t num_messages;  // a choice has a message if its position is from 0 to num_messages - 1

  __device__ __forceinline__ int64_t message_of(int32_t token, int32_t choice) const {
    if (position == nullptr) return token;
    const int32_t found = read(position + int64_t{token} * choices + choice);
    return static_cast<uint32_t>(found) < num_messages ? found : -1;
  }
};

// Returns the scale of a block.
//
// largest: the bits of the largest absolute value in the block. As integers, the bits of NaN are larger than
//     those of Inf, so the scale of a block with a NaN is NaN.
PMOE_HD float scale_of(uint32_t largest) {
  const float scale = float_of(largest) / kLargestE4m3;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// Returns value / scale, rounded as a division rounds. A block has only one scale, so its inverse is computed
// only once. Given the inverse, this function takes 5 multiplications or multiply-adds, where a division
// takes 9 instructions, two of which are slow.
//
// Each of two steps adds the remainder (value - quotient * scale), divided by the scale. After the first step
// the quotient is wrong by one unit in the last place at most, after the second it is right (Markstein's
// theorem). If the value is below 2^-102, the remainder may be too small for a float. But then the quotient
// is below 2^-12, because the scale is at least 2^-90, and e4m3 rounds such a quotient to 0 anyway.
//
// scale: from 2^-90 to the largest float.
// inverse: 1 / scale, rounded as a division rounds.
PMOE_HD float quotient(float value, float scale, float inverse) {
  float found = value * inverse;
  found = fmaf(fmaf(-found, scale, value), inverse, found);
  found = fmaf(fmaf(-found, scale, value), inverse, found);
  return copysignf(found, value);  // the steps make 0 of -0
}

// Divides 4 values by the scale of their block. All lanes of a warp have the same scale.
PMOE_HD void divide_quad(float (&value)[kQuad], float scale) {
  if (scale >= 0x1p-90f && scale <= FLT_MAX) {
    const float inverse = 1.0f / scale;
    PMOE_UNROLL
    for (int i = 0; i < kQuad; ++i) value[i] = quotient(value[i], scale, inverse);
  } else {
    PMOE_UNROLL
    for (int i = 0; i < kQuad; ++i) value[i] /= scale;
  }
}

// Writes the message of each choice of each token. A token's numbers are rounded once, and written to the
// messages of all of its choices.
template <class T, Format kFormat>
__global__ void __launch_bounds__(kThreads) pack_kernel(const Pack p) {
  const auto [token, slice] =
      p.cut.place(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(threadIdx.x));
  if (token >= p.cut.rows) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  Quad<T> row[kSliceBlocks];
  PMOE_UNROLL
  for (int b = 0; b < kSliceBlocks; ++b) {
    row[b] = {};
    const int32_t column = p.cut.column(slice, b, lane);
    if (column < p.cut.columns)
      row[b] = read(reinterpret_cast<const Quad<T>*>(p.tokens.at(token, int64_t{column} * sizeof(T))));
  }
  using Number = std::conditional_t<kFormat == Format::kBf16, Pair, uint32_t>;
  Number number[kSliceBlocks];
  float scale[kSliceBlocks];
  PMOE_UNROLL
  for (int b = 0; b < kSliceBlocks; ++b) {
    float value[kQuad];
    widen_quad<T>(row[b], value);
    if constexpr (kFormat == Format::kBf16) {
      number[b] = narrow_quad<bf16>(value);
    } else {
      uint32_t largest = 0;
      PMOE_UNROLL
      for (int i = 0; i < kQuad; ++i) largest = larger(largest, bits_of(value[i]) & 0x7FFFFFFFu);
      scale[b] = scale_of(reduce_max(largest));
      divide_quad(value, scale[b]);
      number[b] = pack_e4m3(value);
    }
  }
  for (int32_t k = 0; k < p.choices; ++k) {
    const int64_t message = p.message_of(token, k);
    if (message < 0) continue;
    PMOE_UNROLL
    for (int b = 0; b < kSliceBlocks; ++b) {
      const int32_t column = p.cut.column(slice, b, lane);
      const int64_t byte = int64_t{column} * sizeof(Number) / kQuad;
      if (column < p.cut.columns) write(reinterpret_cast<Number*>(p.messages.at(message, byte)), number[b]);
    }
    if constexpr (kFormat == Format::kE4m3) {
      PMOE_UNROLL
      for (int b = 0; b < kSliceBlocks; ++b) {
        const int32_t block = slice * kSliceBlocks + b;
        const int64_t byte = p.cut.columns + int64_t{block} * 4;
        if (lane == b && block * kBlock < p.cut.columns)
          write(reinterpret_cast<float*>(p.messages.at(message, byte)), scale[b]);
      }
    }
  }
}

// ---- messages to rows

// The arguments of unpack_kernel.
struct Unpack {
  Cut cut;  // of the rows that are written
  Rows messages;
  Rows rows;
  const void* index;  // the message of each row; null: row i has message i
  bool wide;          // whether the index is int64, else int32
  int64_t num_messages;

  // Returns the message of a row; -1 if there is none, which makes the row zeros.
  __device__ __forceinline__ int64_t message_of(int32_t row) const {
    int64_t found = row;
    if (index != nullptr)
      found = wide ? read(static_cast<const int64_t*>(index) + row)
                   : int64_t{read(static_cast<const int32_t*>(index) + row)};
    return found < num_messages ? found : -1;
  }
};

template <class T, Format kFormat>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const Unpack p) {
  const auto [row, slice] = p.cut.place(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(threadIdx.x));
  if (row >= p.cut.rows) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int64_t message = p.message_of(row);
  using Number = std::conditional_t<kFormat == Format::kBf16, Pair, uint32_t>;
  Number number[kSliceBlocks];
  float scale[kSliceBlocks];
  PMOE_UNROLL
  for (int b = 0; b < kSliceBlocks; ++b) {
    number[b] = {};
    scale[b] = 0.0f;
    const int32_t column = p.cut.column(slice, b, lane);
    if (message < 0 || column >= p.cut.columns) continue;
    const int64_t byte = int64_t{column} * sizeof(Number) / kQuad;
    number[b] = read(reinterpret_cast<const Number*>(p.messages.at(message, byte)));
    if constexpr (kFormat == Format::kE4m3) {
      const int32_t block = slice * kSliceBlocks + b;
      scale[b] =
          read(reinterpret_cast<const float*>(p.messages.at(message, p.cut.columns + int64_t{block} * 4)));
    }
  }
  PMOE_UNROLL
  for (int b = 0; b < kSliceBlocks; ++b) {
    float value[kQuad];
    if constexpr (kFormat == Format::kBf16) {
      widen_quad<bf16>(number[b], value);
    } else {
      unpack_e4m3(number[b], value);
      PMOE_UNROLL
      for (int i = 0; i < kQuad; ++i) value[i] *= scale[b];
    }
    const int32_t column = p.cut.column(slice, b, lane);
    if (column < p.cut.columns)
      write(reinterpret_cast<Quad<T>*>(p.rows.at(row, int64_t{column} * sizeof(T))), narrow_quad<T>(value));
  }
}

}  // namespace pmoe::wire
