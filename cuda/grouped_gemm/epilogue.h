// From accumulators to the result: bias, nonlinearity, its gradient, weights, in registers.
//
// A warp holds blocks of 16 rows x 32 columns, 16 floats a thread, as the matrix instructions of both paths
// leave them: lane l has, for i in 0..3 and h in 0..1, rows l / 4 + 8 h and columns 8 i + 2 (l % 4) + {0, 1} in
// values[4 i + 2 h + {0, 1}]. A transposition among the four lanes of a row gives each lane eight neighbouring
// columns, 8 (l % 4) + 0..7: one load or store of 16 bytes.
#pragma once
#include "common/device.cuh"
#include "common/scalar.h"
#include "problem.h"
#include "tiles.h"

namespace pmoe {

// Lane q of four holds v[0..3]; afterwards v[i] is what lane i held in v[q].
template <class V>
__device__ __forceinline__ void quad_transpose(V (&v)[4], int q) {
  PMOE_UNROLL
  for (int mask = 1; mask <= 2; mask *= 2) {
    const bool upper = q & mask;
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & mask) continue;
      V& low = v[i];
      V& high = v[i | mask];
      const V received = shfl_xor(upper ? low : high, mask);
      if (upper)
        low = received;
      else
        high = received;
    }
  }
}

// Eight neighbouring columns of one row, rounded.
template <class T>
__device__ __forceinline__ Words narrow_columns(const float* values, int h, int q) {
  uint32_t v[4];
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) v[i] = pack2<T>(values[4 * i + 2 * h], values[4 * i + 2 * h + 1]);
  quad_transpose(v, q);
  return {{v[0], v[1], v[2], v[3]}};
}

// The same, not rounded.
__device__ __forceinline__ void wide_columns(const float* values, int h, int q, float (&out)[8]) {
  float first[4], second[4];
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    first[i] = values[4 * i + 2 * h];
    second[i] = values[4 * i + 2 * h + 1];
  }
  quad_transpose(first, q);
  quad_transpose(second, q);
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = first[i];
    out[2 * i + 1] = second[i];
  }
}

template <class T>
__device__ __forceinline__ void unpack(const Words& words, float (&out)[8]) {
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = low_half<T>(words.word[i]);
    out[2 * i + 1] = high_half<T>(words.word[i]);
  }
}

template <class T>
__device__ __forceinline__ Words pack(const float (&values)[8]) {
  Words words;
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) words.word[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
  return words;
}

// Stores the blocks of one warp's 16 rows. All 32 lanes call block() together.
template <class T, Form kForm, Epilogue kEpilogue, bool kGated>
class Store {
 public:
  // row: the first of the 16 in the tile.
  __device__ __forceinline__ Store(const Problem& p, const Tile& tile, int row, int lane)
      : p_(p), tile_(tile), q_(lane % 4) {
    PMOE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int in_tile = row + lane / 4 + 8 * h;
      exists_[h] = in_tile < tile.rows;
      row_[h] = kForm == Form::kWeight ? int64_t{tile.expert} * p.m + tile.row + in_tile
                                       : int64_t{tile.group_begin} + tile.row + in_tile;
      weight_[h] = 1.0f;
      if (kForm != Form::kWeight && p.weight != nullptr && exists_[h])
        weight_[h] = read(p.weight + (p.slot != nullptr ? read(p.slot + row_[h]) : row_[h]));
      dot_[h] = 0.0f;
    }
  }

  // values: 16 x 32 of the product; column: the first of the 32, in the result. up: of the other half.
  __device__ __forceinline__ void block(const float* values, const float* up, int column) {
    if constexpr (kForm == Form::kWeight) {
      if (p_.wide)
        store_wide(values, column);
      else
        store_narrow(values, column);
    } else if constexpr (kEpilogue == Epilogue::kPlain) {
      store_plain(values, column);
    } else if constexpr (kEpilogue == Epilogue::kHidden) {
      store_hidden(values, up, column);
    } else {
      store_hidden_gradient(values, column);
    }
  }

  // part: which part of the columns these rows' inner products are of.
  __device__ __forceinline__ void finish(int part) {
    if constexpr (kEpilogue == Epilogue::kHiddenGradient) {
      PMOE_UNROLL
      for (int h = 0; h < 2; ++h) {
        float dot = dot_[h];
        dot += shfl_xor(dot, 1);
        dot += shfl_xor(dot, 2);
        if (q_ == 0 && exists_[h]) write(p_.row_dots + int64_t{part} * p_.rows + row_[h], dot);
      }
    }
  }

 private:
  static constexpr int kWide = 8;  // columns of one lane

  __device__ __forceinline__ T* at(void* base, int64_t stride, int h, int column) const {
    return static_cast<T*>(base) + row_[h] * stride + column;
  }

  __device__ __forceinline__ const T* at(const void* base, int64_t stride, int h, int column) const {
    return static_cast<const T*>(base) + row_[h] * stride + column;
  }

  // values + bias, in place of values; columns: all there are. The bias is the same for both rows.
  __device__ __forceinline__ void add_bias(const float* values, int column, int columns, int offset,
                                           float (&sum)[16]) const {
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      float first = 0.0f, second = 0.0f;
      const int own = column + 8 * i + 2 * q_;
      if (p_.bias != nullptr && own < columns) {
        const T* bias = static_cast<const T*>(p_.bias) + int64_t{tile_.expert} * p_.n + offset + own;
        const uint32_t pair = read(reinterpret_cast<const uint32_t*>(bias));
        first = low_half<T>(pair);
        second = high_half<T>(pair);
      }
      PMOE_UNROLL
      for (int h = 0; h < 2; ++h) {
        sum[4 * i + 2 * h] = values[4 * i + 2 * h] + first;
        sum[4 * i + 2 * h + 1] = values[4 * i + 2 * h + 1] + second;
      }
    }
  }

  __device__ __forceinline__ void store_plain(const float* values, int column) const {
    float sum[16];
    add_bias(values, column, p_.n, 0, sum);
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i)
      PMOE_UNROLL
      for (int h = 0; h < 2; ++h) {
        sum[4 * i + 2 * h] *= weight_[h];
        sum[4 * i + 2 * h + 1] *= weight_[h];
      }
    PMOE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const Words words = narrow_columns<T>(sum, h, q_);
      const int own = column + kWide * q_;
      if (exists_[h] && own < p_.n) store16(at(p_.d, p_.d_stride, h, own), words);
    }
  }

  // The activated hidden is that of the rounded one, which is all that backward has.
  __device__ __forceinline__ void store_hidden(const float* values, const float* up, int column) const {
    const int columns = kGated ? p_.n / 2 : p_.n;
    float sum[16], sum_up[16];
    add_bias(values, column, columns, 0, sum);
    if constexpr (kGated) add_bias(up, column, columns, columns, sum_up);
    const int own = column + kWide * q_;
    PMOE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const bool stores = exists_[h] && own < columns;
      const Words hidden = narrow_columns<T>(sum, h, q_);
      float x[8], active[8];
      unpack<T>(hidden, x);
      if (stores && p_.d != nullptr) store16(at(p_.d, p_.d_stride, h, own), hidden);
      if constexpr (kGated) {
        const Words hidden_up = narrow_columns<T>(sum_up, h, q_);
        float y[8];
        unpack<T>(hidden_up, y);
        if (stores && p_.d != nullptr) store16(at(p_.d, p_.d_stride, h, columns + own), hidden_up);
        PMOE_UNROLL
        for (int i = 0; i < 8; ++i) active[i] = silu(x[i]) * y[i];
      } else {
        PMOE_UNROLL
        for (int i = 0; i < 8; ++i) active[i] = activate(p_.activation, x[i]);
      }
      if (stores) store16(at(p_.active, p_.active_stride, h, own), pack<T>(active));
    }
  }

  // values: <dT_O, w2>, before the routing weight is multiplied in, so that <active, values> is its gradient.
  __device__ __forceinline__ void store_hidden_gradient(const float* values, int column) {
    const int own = column + kWide * q_;
    PMOE_UNROLL
    for (int h = 0; h < 2; ++h) {
      float grad[8], x[8], active[8], grad_x[8];
      wide_columns(values, h, q_, grad);
      if (!exists_[h] || own >= p_.n) continue;
      unpack<T>(load16(at(p_.hidden, p_.hidden_stride, h, own)), x);
      const float weight = weight_[h];
      if constexpr (kGated) {
        float up[8], grad_up[8];
        unpack<T>(load16(at(p_.hidden, p_.hidden_stride, h, p_.n + own)), up);
        PMOE_UNROLL
        for (int i = 0; i < 8; ++i) {
          const float s = silu(x[i]);
          active[i] = s * up[i];
          grad_x[i] = weight * grad[i] * up[i] * silu_derivative(x[i]);
          grad_up[i] = weight * grad[i] * s;
        }
        store16(at(p_.d, p_.d_stride, h, p_.n + own), pack<T>(grad_up));
      } else {
        PMOE_UNROLL
        for (int i = 0; i < 8; ++i) {
          active[i] = activate(p_.activation, x[i]);
          grad_x[i] = weight * grad[i] * activation_derivative(p_.activation, x[i]);
        }
      }
      store16(at(p_.d, p_.d_stride, h, own), pack<T>(grad_x));
      const float scale = p_.weighs_active ? weight : 1.0f;
      PMOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        dot_[h] += active[i] * grad[i];
        active[i] *= scale;
      }
      store16(at(p_.active, p_.active_stride, h, own), pack<T>(active));
    }
  }

  __device__ __forceinline__ void store_wide(const float* values, int column) const {
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i)
      PMOE_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int own = column + 8 * i + 2 * q_;
        if (!exists_[h] || own >= p_.n) continue;
        auto* out = reinterpret_cast<Pair*>(static_cast<float*>(p_.d) + row_[h] * p_.n + own);
        Pair sum = {values[4 * i + 2 * h], values[4 * i + 2 * h + 1]};
        if (p_.accumulates) {
          const Pair before = read(out);
          sum.first += before.first;
          sum.second += before.second;
        }
        write(out, sum);
      }
  }

  __device__ __forceinline__ void store_narrow(const float* values, int column) const {
    PMOE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const Words words = narrow_columns<T>(values, h, q_);
      const int own = column + kWide * q_;
      if (exists_[h] && own < p_.n) store16(at(p_.d, p_.n, h, own), words);
    }
  }

  struct alignas(8) Pair {
    float first, second;
  };

  const Problem& p_;
  const Tile& tile_;
  int q_;
  bool exists_[2];
  int64_t row_[2];
  float weight_[2], dot_[2];
};

}  // namespace pmoe
