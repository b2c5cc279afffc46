// The epilogue: turns accumulators into the stored result (bias, nonlinearity or its gradient, routing
// weights).
//
// A warp stores 16 rows of a tile. One call of Store::block() takes 64 columns of accumulators (a block): two
// groups of 32 columns, with 16 floats of each lane for each group. The floats are laid out as the matrix
// instructions leave them. Lane l holds, for j in 0..3 and h in 0..1, in values[4 j + 2 h + {0, 1}]:
//
//   row l / 4 + 8 h,   columns 8 j + 2 (l % 4) + {0, 1}
//
// The two groups are neighbouring columns, or matching columns of the two halves (gate and up) of a SwiGLU
// expert. All arithmetic is done in this layout. An Exchange converts from and to it where memory is read or
// written.
#pragma once
#include "boxes.cuh"
#include "common/device.cuh"
#include "common/scalar.h"
#include "exchange.cuh"
#include "problem.h"
#include "tiles.h"

namespace pmoe {

// Rounds 16 rows x 64 columns of floats to elements T, and packs two neighbouring values into each word.
template <class T>
__device__ __forceinline__ void round_all(const float (&values)[32], uint32_t (&word)[16]) {
  PMOE_UNROLL
  for (int i = 0; i < 16; ++i) word[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
}

// Starts to load into the L2 cache the part of T_M (the hidden activation) that a tile's epilogue will read.
// It is called when the tile's product begins.
//
// The gradient of SwiGLU reads both halves of T_M: a warp reads 16 rows x `width` columns of each half. Other
// gradients load T_M into registers ahead of time; for SwiGLU there are too few registers.
//
// row: index, in the tile, of the first of the warp's 16 rows.
template <class T>
__device__ __forceinline__ void prefetch_halves(const Problem& p, const Tile& tile, int row, int lane,
                                                int width) {
  constexpr int kLine = 128 / sizeof(T);
  const int lines = 2 * width / kLine;
  for (int i = lane; i < 16 * lines; i += 32) {
    const int own = row + i / lines, line = i % lines;
    const int column = tile.column + line / 2 * kLine;
    if (own < tile.rows && column < p.n)
      prefetch_l2(static_cast<const T*>(p.hidden) +
                  (int64_t{tile.group_begin} + tile.row + own) * p.hidden_stride + line % 2 * p.n + column);
  }
}

// Stores 16 rows of a tile. All 32 lanes of a warp must call each member function together.
//
// Buffer: how fragments reach memory: through registers (Exchange), or by the tensor memory accelerator
//     (Boxes, see boxes.cuh).
template <class T, Form kForm, Epilogue kEpilogue, Activation kActivation, class Buffer>
class Store {
 public:
  static constexpr bool kGated = kActivation == Activation::kSwiglu;
  // Whether the arguments `first` and `second` of block() are the same columns of SwiGLU's two halves, gate
  // and up. If not, they are neighbouring columns.
  static constexpr bool kHalves = are_halves(kEpilogue, kActivation);
  static constexpr bool kBoxed = Buffer::kStoresBoxes;
  static_assert(!kBoxed || kEpilogue != Epilogue::kHiddenGradient, "gradients read T_M through an Exchange");
  // Number of result columns that one call of block() stores; for SwiGLU, the number in each half of the
  // hidden columns.
  //
  // - Gradients: 32. There are too few registers for the accumulators, T_M and two results of more columns.
  // - SwiGLU through an Exchange: 32, because the two halves share the 64 columns of the Exchange.
  // - SwiGLU as boxes: 64, because each half has a box of its own.
  static constexpr int kBlockColumns =
      (kGated && !kBoxed) || kEpilogue == Epilogue::kHiddenGradient ? 32 : 64;

  // Prepares to store 16 rows of a tile by one warp, and loads their routing weights.
  //
  // row: index, in the tile, of the first of these 16 rows.
  // buffer: shared memory that only this warp uses.
  __device__ __forceinline__ Store(const Problem& p, const Tile& tile, int row, int lane,
                                   const Buffer& buffer)
      : p_(p), buffer_(buffer), lane_(lane), expert_(tile.expert), left_(tile.rows - row) {
    first_ = kForm == Form::kWeight ? int64_t{tile.expert} * p.m + tile.row + row
                                    : int64_t{tile.group_begin} + tile.row + row;
    begin_rows();
  }

  // Goes on to the 16 rows that lie `rows` rows below the present ones. finish() must have been called.
  __device__ __forceinline__ void move_down(int rows) {
    first_ += rows, left_ -= rows;
    begin_rows();
  }

  // This lane's part of the values of T_M (the hidden activation) that the warp needs for one call of
  // block(), if it computes a gradient. fetch() loads them before the call.
  struct Ahead {
    Words hidden[4];
  };

  // Loads this lane's values of T_M for the call of block() at `column`. It is called earlier than block(),
  // to hide the latency.
  __device__ __forceinline__ void fetch(int column, Ahead& ahead) const {
    if constexpr (kEpilogue == Epilogue::kHiddenGradient) {
      const int chunk = buffer_.column(), own = column + chunk % 32;
      const bool wanted = (kGated || chunk < 32) && own < p_.n;
      PMOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        ahead.hidden[i] = {{0, 0, 0, 0}};
        if (wanted && exists(i))
          ahead.hidden[i] = load16(static_cast<const T*>(p_.hidden) +
                                   at(p_.hidden_stride, i, own + (chunk < 32 ? 0 : p_.n)));
      }
    }
  }

  // Stores one block of columns.
  //
  // first, second: accumulators of 16 rows x 32 columns each; if both halves are stored as boxes, of 16 rows
  //     x 64 columns each. A gradient uses `first` only.
  // column: the column of the result, or of its first half, where `first` begins. `second` begins 32 columns
  //     further on, or at the same column of the second half.
  // ahead: the values that fetch() has loaded for this block.
  // next(): calls fetch() for the next block. It is called once, as soon as `ahead` may be overwritten: at
  //     the beginning, or, for the gradient of SwiGLU, when half of the results are stored and registers are
  //     free.
  template <class Next>
  __device__ __forceinline__ void block(const float* first, const float* second, int column,
                                        const Ahead& ahead, const Next& next) {
    const Ahead own = ahead;
    if constexpr (!kGated) next();
    // Without these calls the compiler would keep the addresses of all rows in registers, and would spill
    // accumulators.
    make_opaque(first_);
    buffer_.recompute_addresses();
    if constexpr (kBoxed && kHalves) return store_hidden_boxes(first, second, column);
    float values[32];
    take(first, second, values);
    if constexpr (kForm == Form::kWeight) {
      if (p_.wide)
        store_wide(values, column);
      else
        store_rounded(values, column);
    } else if constexpr (kEpilogue == Epilogue::kPlain || kEpilogue == Epilogue::kWideOrPlain) {
      if constexpr (kEpilogue == Epilogue::kWideOrPlain)
        if (p_.wide) return store_wide(values, column);
      if (p_.bias != nullptr) add_bias(values, column);
      if (p_.weight != nullptr) {
        PMOE_UNROLL
        for (int i = 0; i < 32; ++i) values[i] *= weight_[i / 2 % 2];
      }
      store_rounded(values, column);
    } else if constexpr (kEpilogue == Epilogue::kHidden) {
      if (p_.bias != nullptr) add_bias(values, column);
      store_hidden(values, column);
    } else {
      store_hidden_gradient(values, column, own, next);
    }
  }

  // Stores the inner products of the rows, which are the gradients of their routing weights. It must be
  // called after the last block.
  //
  // part: index of this warp's partial sums in Problem::row_dots. An inner product is a sum over all columns,
  //     and this warp has summed over some of them.
  __device__ __forceinline__ void finish(int part) {
    if constexpr (kEpilogue == Epilogue::kHiddenGradient) {
      PMOE_UNROLL
      for (int h = 0; h < 2; ++h) {
        float dot = dot_[h];
        dot += shfl_xor(dot, 1);
        dot += shfl_xor(dot, 2);
        const int own = lane_ / 4 + 8 * h;
        if (lane_ % 4 == 0 && own < left_) write(p_.row_dots + int64_t{part} * p_.rows + first_ + own, dot);
      }
    }
  }

 private:
  // Loads the routing weights of the 16 rows.
  __device__ __forceinline__ void begin_rows() {
    PMOE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int own = lane_ / 4 + 8 * h;
      weight_[h] = 1.0f;
      const bool by_slot = kForm == Form::kForward && p_.slot != nullptr;
      if (kForm != Form::kWeight && p_.weight != nullptr && own < left_)
        weight_[h] = read(p_.weight + (by_slot ? read(p_.slot + first_ + own) : first_ + own));
      dot_[h] = 0.0f;
    }
  }

  // Returns the factor by which the activated hidden of row h is multiplied: its routing weight if
  // weighs_active is set, else 1.
  __device__ __forceinline__ float scale(int h) const { return p_.weighs_active ? weight_[h] : 1.0f; }

  // Returns the number of columns of the result, or of one half if it has two.
  __device__ __forceinline__ int columns() const { return kHalves ? p_.n / 2 : p_.n; }

  // at() returns the offset, in elements, of a column in the i-th row that this lane stores. exists() returns
  // whether this row is one of the tile's rows: the expert's last tile may have fewer.
  __device__ __forceinline__ int64_t at(int64_t stride, int i, int column) const {
    return (first_ + buffer_.row(i)) * stride + column;
  }
  __device__ __forceinline__ bool exists(int i) const { return buffer_.row(i) < left_; }

  // Copies the accumulators of two groups of 32 columns.
  static __device__ __forceinline__ void take(const float* first, const float* second, float (&values)[32]) {
    PMOE_UNROLL
    for (int i = 0; i < 16; ++i) {
      values[i] = first[i];
      values[16 + i] = second[i];
    }
  }

  // Stores 64 neighbouring columns: as a box, if results are stored as boxes and all 16 rows exist; else
  // through registers.
  //
  // map: the member of StoreMaps that is the result's tensor map.
  __device__ __forceinline__ void store_words(const uint32_t (&word)[16], TensorMap StoreMaps::* map,
                                              void* base, int64_t stride, int column, int columns) {
    if constexpr (kBoxed) {
      if (left_ >= kBoxRows)
        buffer_.store(word, buffer_.maps().*map, column, static_cast<int>(first_));
      else
        store_rows(word, base, stride, column, columns);
      buffer_.take_other_box();
    } else {
      store_rows(word, base, stride, column, columns);
    }
  }

  // Stores 64 neighbouring columns through registers.
  __device__ __forceinline__ void store_rows(const uint32_t (&word)[16], void* base, int64_t stride,
                                             int column, int columns) const {
    Words rows[4];
    buffer_.to_rows(word, rows);
    const int own = column + buffer_.column();
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (exists(i) && own < columns) store16(static_cast<T*>(base) + at(stride, i, own), rows[i]);
  }

  // Stores 32 columns, and 32 columns of the other half of the row, which begin `apart` elements later. If
  // `apart` is 0, the row has one half, and only the first 32 columns are stored.
  __device__ __forceinline__ void store_halves(const uint32_t (&word)[16], void* base, int64_t stride,
                                               int column, int apart) const {
    Words rows[4];
    buffer_.to_rows(word, rows);
    const int chunk = buffer_.column(), own = column + chunk % 32;
    if ((apart == 0 && chunk >= 32) || own >= columns()) return;
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (exists(i)) store16(static_cast<T*>(base) + at(stride, i, own + (chunk < 32 ? 0 : apart)), rows[i]);
  }

  // Stores 32 columns of two different results.
  __device__ __forceinline__ void store_two(const uint32_t (&word)[16], void* first, int64_t first_stride,
                                            void* second, int64_t second_stride, int column) const {
    Words rows[4];
    buffer_.to_rows(word, rows);
    const int chunk = buffer_.column(), own = column + chunk % 32;
    T* base = static_cast<T*>(chunk < 32 ? first : second);
    const int64_t stride = chunk < 32 ? first_stride : second_stride;
    if (own >= p_.n) return;
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (exists(i)) store16(base + at(stride, i, own), rows[i]);
  }

  __device__ __forceinline__ void store_rounded(const float (&values)[32], int column) {
    uint32_t word[16];
    round_all<T>(values, word);
    if (kForm == Form::kWeight)
      store_words(word, &StoreMaps::d, p_.d, p_.n, column, p_.n);
    else if (p_.place == nullptr)
      store_words(word, &StoreMaps::d, p_.d, p_.d_stride, column, p_.n);
    else
      store_placed(word, column);
  }

  // Stores 64 neighbouring columns of the result: row r as row Problem::place[r] of D.
  __device__ __forceinline__ void store_placed(const uint32_t (&word)[16], int column) const {
    int32_t place[4];
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i) place[i] = exists(i) ? read(p_.place + first_ + buffer_.row(i)) : 0;
    Words rows[4];
    buffer_.to_rows(word, rows);  // while the places are loaded
    const int own = column + buffer_.column();
    PMOE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (exists(i) && own < p_.n)
        store16(static_cast<T*>(p_.d) + int64_t{place[i]} * p_.d_stride + own, rows[i]);
  }

  // Adds the bias. A lane has two rows, which get the same bias.
  __device__ __forceinline__ void add_bias(float (&values)[32], int column) const {
    const T* bias = static_cast<const T*>(p_.bias) + int64_t{expert_} * p_.n;
    PMOE_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int own = column + 8 * (kHalves ? j % 4 : j) + 2 * (lane_ % 4);
      if (own >= columns()) continue;
      const uint32_t pair =
          read(reinterpret_cast<const uint32_t*>(bias + own + (kHalves && j >= 4 ? columns() : 0)));
      PMOE_UNROLL
      for (int h = 0; h < 2; ++h) {
        values[4 * j + 2 * h] += low_half<T>(pair);
        values[4 * j + 2 * h + 1] += high_half<T>(pair);
      }
    }
  }

  // Stores the hidden activation T_M, and the activation after the nonlinearity, which is computed from the
  // rounded T_M. Backward has only the rounded T_M, and must get the same activation from it.
  __device__ __forceinline__ void store_hidden(const float (&values)[32], int column) {
    uint32_t hidden[16], active[16];
    round_all<T>(values, hidden);
    if constexpr (kHalves) {
      if (p_.d != nullptr) store_halves(hidden, p_.d, p_.d_stride, column, columns());
      PMOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        active[i] = gated_pair(hidden[i], hidden[8 + i]);
        active[8 + i] = 0;
      }
      store_halves(active, p_.active, p_.active_stride, column, 0);
    } else {
      if (p_.d != nullptr) store_words(hidden, &StoreMaps::d, p_.d, p_.d_stride, column, p_.n);
      using F = Function<kActivation>;
      PMOE_UNROLL
      for (int i = 0; i < 16; ++i)
        active[i] = pack2<T>(F::value(low_half<T>(hidden[i])), F::value(high_half<T>(hidden[i])));
      store_words(active, &StoreMaps::active, p_.active, p_.active_stride, column, p_.n);
    }
  }

  // Stores what store_hidden() stores, for 64 columns of each half of SwiGLU. The 64 columns of a half are a
  // box.
  //
  // gate, up: accumulators of 16 rows x 64 columns each.
  __device__ __forceinline__ void store_hidden_boxes(const float* gate, const float* up, int column) {
    uint32_t gate_word[16], up_word[16];
    unrolled<2>([&](auto index) {
      constexpr int kFirst = decltype(index)::value * 8;
      float values[32];
      uint32_t both[16];
      take(gate + 2 * kFirst, up + 2 * kFirst, values);
      if (p_.bias != nullptr) add_bias(values, column + 4 * kFirst);
      round_all<T>(values, both);
      PMOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        gate_word[kFirst + i] = both[i];
        up_word[kFirst + i] = both[8 + i];
      }
    });
    T* const d = static_cast<T*>(p_.d);
    if (d != nullptr) {
      store_words(gate_word, &StoreMaps::d, d, p_.d_stride, column, columns());
      store_words(up_word, &StoreMaps::up, d + columns(), p_.d_stride, column, columns());
    }
    PMOE_UNROLL
    for (int i = 0; i < 16; ++i) gate_word[i] = gated_pair(gate_word[i], up_word[i]);
    store_words(gate_word, &StoreMaps::active, p_.active, p_.active_stride, column, columns());
  }

  // Returns silu(gate) * up of two neighbouring columns.
  static __device__ __forceinline__ uint32_t gated_pair(uint32_t gate, uint32_t up) {
    return pack2<T>(Silu::value(low_half<T>(gate)) * low_half<T>(up),
                    Silu::value(high_half<T>(gate)) * high_half<T>(up));
  }

  // Stores the gradient of the hidden activation.
  //
  // values: dT_DO w2, the gradient of the activation after the nonlinearity, not yet multiplied by the
  //     routing weight. So the inner product of these values and that activation is the gradient of the
  //     routing weight.
  template <class Next>
  __device__ __forceinline__ void store_hidden_gradient(const float (&values)[32], int column,
                                                        const Ahead& ahead, const Next& next) {
    uint32_t hidden[16], word[16];
    buffer_.to_fragments(ahead.hidden, hidden);
    if constexpr (kGated) {
      PMOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int h = i % 2;
        uint32_t& up = hidden[8 + i];
        float a[2], g[2], u[2];
        gated(low_half<T>(hidden[i]), low_half<T>(up), values[2 * i], weight_[h], a[0], g[0], u[0]);
        gated(high_half<T>(hidden[i]), high_half<T>(up), values[2 * i + 1], weight_[h], a[1], g[1], u[1]);
        dot_[h] += a[0] * values[2 * i] + a[1] * values[2 * i + 1];
        word[i] = pack2<T>(a[0] * scale(h), a[1] * scale(h));
        word[8 + i] = 0;
        hidden[i] = pack2<T>(g[0], g[1]);
        up = pack2<T>(u[0], u[1]);
      }
      store_halves(hidden, p_.d, p_.d_stride, column, columns());
      next();
      store_halves(word, p_.active, p_.active_stride, column, 0);
    } else {
      using F = Function<kActivation>;
      PMOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int h = i % 2;
        const float low = low_half<T>(hidden[i]), high = high_half<T>(hidden[i]);
        const float a[2] = {F::value(low), F::value(high)};
        dot_[h] += a[0] * values[2 * i] + a[1] * values[2 * i + 1];
        word[i] = pack2<T>(weight_[h] * values[2 * i] * F::derivative(low),
                           weight_[h] * values[2 * i + 1] * F::derivative(high));
        word[8 + i] = pack2<T>(a[0] * scale(h), a[1] * scale(h));
      }
      store_two(word, p_.d, p_.d_stride, p_.active, p_.active_stride, column);
    }
  }

  // Computes active = silu(x) * up, and the gradients of x and up. The gradient of active is weight * grad.
  static __device__ __forceinline__ void gated(float x, float up, float grad, float weight, float& active,
                                               float& grad_x, float& grad_up) {
    const float s = sigmoid(x), value = x * s, weighted = weight * grad;
    active = value * up;
    grad_up = weighted * value;
    grad_x = weighted * up * (s + value * (1.0f - s));
  }

  __device__ __forceinline__ void store_wide(const float (&values)[32], int column) const {
    PMOE_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int row = lane_ / 4 + 8 * (i % 2), own = column + 8 * (i / 2) + 2 * (lane_ % 4);
      if (row >= left_ || own >= p_.n) continue;
      float* const out = static_cast<float*>(p_.d) + (first_ + row) * p_.n + own;
      if (p_.accumulates)
        add_pair(out, values[2 * i], values[2 * i + 1]);
      else
        write(reinterpret_cast<Pair*>(out), Pair{values[2 * i], values[2 * i + 1]});
    }
  }

  struct alignas(8) Pair {
    float first, second;
  };

  const Problem& p_;
  Buffer buffer_;
  int lane_, expert_;
  int left_;       // number of the tile's rows from the first of the 16 rows on; may exceed 16
  int64_t first_;  // index in the result of the first of the 16 rows
  float weight_[2], dot_[2];
};

}  // namespace pmoe
