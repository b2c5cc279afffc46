// Kernels that copy tokens into rows sorted by expert, and sum the rows of each token. They use no torch.
//
// Every kernel goes through the tokens in their order, and reads or writes each token once. It finds the K
// sorted rows of a token by their positions, and reads or writes each of these rows once. A position outside
// the sorted rows marks a dropped (token, choice) pair, which has no row. Sums are float32, added in a fixed
// order, and rounded once. layout.h says which thread copies which bytes.
//
// Letters: T tokens, K choices, N sorted rows. `a` is the tensor with one row for each token, `b` the tensor
// with K rows for each token.
#pragma once
#include <cmath>

#include "common/device.cuh"
#include "common/scalar.h"
#include "permute/launch.h"
#include "permute/layout.h"

namespace pmoe::permute {

// The rows of a tensor, as a kernel reads or writes them. Each row begins on a multiple of 16 bytes.
struct Rows {
  uint8_t* base;
  int64_t stride_bytes;

  PMOE_HD uint8_t* at(int64_t row, int32_t vector) const {
    return base + row * stride_bytes + int64_t{vector} * 16;
  }
};

// The (token, choice) slots of all tokens: the position of each slot's row among the sorted rows, and its
// weight.
struct Slots {
  const int32_t* position;  // (T, K)
  const float* weight;      // (T, K); null if the kernel is not weighted
  int32_t choices;
  uint32_t num_rows;       // number of sorted rows; at most 2**31, as positions are 32-bit numbers
  uint32_t first_row = 0;  // the sorted rows are first_row .. first_row + num_rows - 1; less than 2**31

  PMOE_HD bool kept(int32_t position) const { return static_cast<uint32_t>(position) - first_row < num_rows; }
};

// ---- 16 bytes as floats or 16-bit numbers

template <class T>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

template <class T>
PMOE_HD void unpack(const Words& v, float (&x)[kPerVector<T>]) {
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = float_of(v.word[i]);
    } else {
      x[2 * i] = low_half<T>(v.word[i]);
      x[2 * i + 1] = high_half<T>(v.word[i]);
    }
  }
}

template <class T>
PMOE_HD Words pack(const float (&x)[kPerVector<T>]) {
  Words v;
  PMOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      v.word[i] = bits_of(x[i]);
    } else {
      v.word[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
    }
  }
  return v;
}

template <class T>
PMOE_HD Words scaled(const Words& v, float weight) {
  float x[kPerVector<T>];
  unpack<T>(v, x);
  PMOE_UNROLL
  for (int i = 0; i < kPerVector<T>; ++i) x[i] *= weight;
  return pack<T>(x);
}

// Computes sum[i] += weight * v[i].
template <class T>
PMOE_HD void add_scaled(float (&sum)[kPerVector<T>], const Words& v, float weight) {
  float x[kPerVector<T>];
  unpack<T>(v, x);
  PMOE_UNROLL
  for (int i = 0; i < kPerVector<T>; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}

// Returns sum + <v, w>, added element by element.
template <class T>
PMOE_HD float add_dot(float sum, const Words& v, const Words& w) {
  float x[kPerVector<T>], y[kPerVector<T>];
  unpack<T>(v, x);
  unpack<T>(w, y);
  PMOE_UNROLL
  for (int i = 0; i < kPerVector<T>; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}

// ---- functions that all kernels share

// Some choices of one token: the position of each choice's row (-1 if dropped), and its weight (0 if
// dropped).
template <int kChoices>
struct Chosen {
  int32_t row[kChoices];
  float weight[kChoices];
};

// Loads the choices k0, k0 + 1, ... of a token. Choices beyond the last one count as dropped.
//
// alive: whether the token exists; if not, all choices count as dropped.
template <int kChoices, bool kWeighted>
__device__ __forceinline__ Chosen<kChoices> load_chosen(const Slots& slots, int64_t token, int32_t k0,
                                                        bool alive = true) {
  Chosen<kChoices> found;
  const int64_t at = token * slots.choices + k0;
  PMOE_UNROLL
  for (int j = 0; j < kChoices; ++j) {
    const bool there = alive && k0 + j < slots.choices;
    found.row[j] = there ? slots.position[at + j] : -1;
    found.weight[j] = !kWeighted ? 1.0f : there ? slots.weight[at + j] : 0.0f;
  }
  PMOE_UNROLL
  for (int j = 0; j < kChoices; ++j) {
    const bool kept = slots.kept(found.row[j]);
    found.row[j] = kept ? found.row[j] : -1;
    found.weight[j] = kept ? found.weight[j] : 0.0f;
  }
  return found;
}

// Loads a lane's 16-byte vectors of one slice of a row. A vector beyond the row's end is set to zero. If
// `row` is negative, all vectors are set to zero.
//
// from: index in the row of the lane's first vector in the slice (Cut::first).
template <int kVectors>
__device__ __forceinline__ void load_slice(Words (&v)[kVectors], const Cut& cut, const Rows& rows,
                                           int64_t row, int32_t from) {
  PMOE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    v[i] = {{0, 0, 0, 0}};
    const int32_t vector = cut.vector(from, i);
    if (row >= 0 && vector < cut.row_vectors) v[i] = load16(rows.at(row, vector));
  }
}

// Stores a lane's 16-byte vectors of one slice of a row, except those beyond the row's end.
template <int kVectors>
__device__ __forceinline__ void store_slice(const Words (&v)[kVectors], const Cut& cut, const Rows& rows,
                                            int64_t row, int32_t from) {
  PMOE_UNROLL
  for (int i = 0; i < kVectors; ++i) {
    const int32_t vector = cut.vector(from, i);
    if (vector < cut.row_vectors) store16(rows.at(row, vector), v[i]);
  }
}

template <class T, int kVectors>
__device__ __forceinline__ void store_scaled(const Words (&v)[kVectors], float weight, const Cut& cut,
                                             const Rows& rows, int64_t row, int32_t from) {
  Words found[kVectors];
  PMOE_UNROLL
  for (int i = 0; i < kVectors; ++i) found[i] = scaled<T>(v[i], weight);
  store_slice(found, cut, rows, row, from);
}

template <class T, int kVectors>
__device__ __forceinline__ void store_sums(const float (&sum)[kVectors][kPerVector<T>], const Cut& cut,
                                           const Rows& rows, int64_t row, int32_t from) {
  Words found[kVectors];
  PMOE_UNROLL
  for (int i = 0; i < kVectors; ++i) found[i] = pack<T>(sum[i]);
  store_slice(found, cut, rows, row, from);
}

// ---- permute: b[position] = weight * a[token]

// The second argument of __launch_bounds__ is the minimum number of blocks on a multiprocessor. It is small
// in this file: 3 or 2, and not given for permute. So the compiler may use many registers for a thread, which
// can then start several loads before it uses the first value.
constexpr int kThreads = 256;
constexpr int kPermuteVectors = 4;
constexpr int kPermuteChoices = 4;  // number of positions loaded together

template <class T, bool kWeighted>
__device__ __forceinline__ void permute_block(const Cut& cut, const Slots& slots, const Rows& a,
                                              const Rows& b, int64_t block) {
  const Cut::Place at = cut.place(block, threadIdx.x);
  if (at.token >= cut.tokens) return;
  for (int32_t from = cut.first(at); from < cut.row_vectors; from += cut.step()) {
    Words x[kPermuteVectors];
    load_slice(x, cut, a, at.token, from);
    for (int32_t k0 = 0; k0 < slots.choices; k0 += kPermuteChoices) {
      const auto chosen = load_chosen<kPermuteChoices, kWeighted>(slots, at.token, k0);
      PMOE_UNROLL
      for (int j = 0; j < kPermuteChoices; ++j) {
        if (chosen.row[j] < 0) continue;
        if constexpr (kWeighted) {
          store_scaled<T>(x, chosen.weight[j], cut, b, chosen.row[j], from);
        } else {
          store_slice(x, cut, b, chosen.row[j], from);
        }
      }
    }
  }
}

template <class T, bool kWeighted>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const Cut cut, const Slots slots, const Rows a, const Rows b) {
  permute_block<T, kWeighted>(cut, slots, a, b, blockIdx.x);
}

// The arguments of permute_several_kernel: up to kMostCopies permutes. The first block of permute i is
// first_block[i]. In an entry that is not used, it is UINT32_MAX, which is behind the last block of the grid.
struct Copies {
  Cut cut;  // the same for all permutes, except for the number of tokens
  int64_t tokens[kMostCopies];
  uint32_t first_block[kMostCopies];
  Slots slots[kMostCopies];
  Rows a[kMostCopies], b[kMostCopies];
};

// Makes several permutes in one launch, without weights. They may have different tokens, positions and rows.
__global__ void __launch_bounds__(kThreads) permute_several_kernel(const __grid_constant__ Copies copies) {
  int which = 0;
  PMOE_UNROLL
  for (int i = 1; i < kMostCopies; ++i) which += blockIdx.x >= copies.first_block[i];
  Cut cut = copies.cut;
  cut.tokens = copies.tokens[which];
  permute_block<float, false>(cut, copies.slots[which], copies.a[which], copies.b[which],
                              blockIdx.x - copies.first_block[which]);
}

// ---- unpermute: a[token] = sum over k of weight * b[position]

template <class T, int kVectors, int kChoices, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 3)
    unpermute_kernel(const Cut cut, const Slots slots, const Rows b, const Rows a) {
  const Cut::Place at = cut.place(blockIdx.x, threadIdx.x);
  if (at.token >= cut.tokens) return;
  for (int32_t from = cut.first(at); from < cut.row_vectors; from += cut.step()) {
    float sum[kVectors][kPerVector<T>] = {};
    for (int32_t k0 = 0; k0 < slots.choices; k0 += kChoices) {
      const auto chosen = load_chosen<kChoices, kWeighted>(slots, at.token, k0);
      Words y[kChoices][kVectors];
      PMOE_UNROLL
      for (int j = 0; j < kChoices; ++j) load_slice(y[j], cut, b, chosen.row[j], from);
      PMOE_UNROLL
      for (int j = 0; j < kChoices; ++j) {
        PMOE_UNROLL
        for (int i = 0; i < kVectors; ++i) add_scaled<T>(sum[i], y[j][i], chosen.weight[j]);
      }
    }
    store_sums<T>(sum, cut, a, at.token, from);
  }
}

// ---- both gradients at once: of the rows, and of the weights, <a[token], b[position]>

// The operation whose gradient backward_kernel computes.
enum class Of { kPermute, kUnpermute };

constexpr int kMostChoices = 256;  // the inner products of a block's 32 groups then take 32 KiB

inline int dots_bytes(const Cut& cut, int choices) {
  return cut.groups() * choices * static_cast<int>(sizeof(float));
}

// Returns the shared memory for the inner products of this thread's group: K floats. A group is the threads
// that copy slices of a row together (layout.h).
__device__ __forceinline__ float* dots_of_group(const Cut& cut, const Slots& slots) {
  return reinterpret_cast<float*>(shared_memory()) + cut.group(threadIdx.x) * slots.choices;
}

// Sums each number of dot[] over the lanes of a group. Lane 0 then stores the first `left` sums in of_group
// or, if `write` is false, adds them to the numbers there. It sets dot[] to zero. All lanes of a warp must
// call this function.
template <int kChoices>
__device__ __forceinline__ void keep_dots(float* of_group, float (&dot)[kChoices], const Cut& cut,
                                          int32_t lane, int32_t left, bool write) {
  for (int32_t mask = cut.lanes / 2; mask > 0; mask /= 2) {
    PMOE_UNROLL
    for (int j = 0; j < kChoices; ++j) dot[j] += shfl_xor(dot[j], mask);
  }
  PMOE_UNROLL
  for (int j = 0; j < kChoices; ++j) {
    if (lane == 0 && j < left) of_group[j] = write ? dot[j] : of_group[j] + dot[j];
    dot[j] = 0.0f;
  }
}

// Writes d_weight for the tokens of this block. Several groups of threads have computed partial inner
// products for a token; this function adds them in a fixed order. The gradient of a dropped (token, choice)
// pair is 0, even if a[token] is not finite.
__device__ __forceinline__ void write_dots(const Cut& cut, const Slots& slots, float* d_weight) {
  const float* all = reinterpret_cast<const float*>(shared_memory());
  const int64_t first_token = cut.block_token(blockIdx.x);
  const int64_t tokens = smaller<int64_t>(cut.block_tokens(), cut.tokens - first_token);
  sync_block();
  for (int32_t e = threadIdx.x; e < tokens * slots.choices; e += cut.threads) {
    const float* of_token = all + e / slots.choices * (cut.parts - 1) * slots.choices + e;
    float sum = of_token[0];
    for (int32_t part = 1; part < cut.parts; ++part) sum += of_token[part * slots.choices];
    const int64_t slot = first_token * slots.choices + e;
    d_weight[slot] = slots.kept(slots.position[slot]) ? sum : 0.0f;
  }
}

// Computes the gradient of the weights, d_weight[slot] = <a[token], b[position]>, and the gradient of the
// operation's input, `out`:
//
//   kOf          a                 b                     out
//   kPermute     x                 gradient of rows      out[token] = sum over k of weight * b[position]
//   kUnpermute   gradient of y     rows                  out[position] = weight * a[token]
template <class T, int kVectors, int kChoices, Of kOf>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const Cut cut, const Slots slots, const Rows a, const Rows b, const Rows out,
                    float* d_weight) {
  const Cut::Place at = cut.place(blockIdx.x, threadIdx.x);
  const bool alive = at.token < cut.tokens;  // threads without a token only take part in synchronization
  float* of_group = dots_of_group(cut, slots);
  const int32_t begin = cut.first(at) - at.lane;
  float dot[kChoices] = {};
  for (int32_t start = begin; start < cut.row_vectors; start += cut.step()) {
    const int32_t from = start + at.lane;
    Words x[kVectors];
    load_slice(x, cut, a, alive ? at.token : -1, from);
    float sum[kVectors][kPerVector<T>] = {};
    for (int32_t k0 = 0; k0 < slots.choices; k0 += kChoices) {
      const auto chosen = load_chosen<kChoices, true>(slots, at.token, k0, alive);
      Words y[kChoices][kVectors];
      PMOE_UNROLL
      for (int j = 0; j < kChoices; ++j) load_slice(y[j], cut, b, chosen.row[j], from);
      PMOE_UNROLL
      for (int j = 0; j < kChoices; ++j) {
        PMOE_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          dot[j] = add_dot<T>(dot[j], x[i], y[j][i]);
          if constexpr (kOf == Of::kPermute) add_scaled<T>(sum[i], y[j][i], chosen.weight[j]);
        }
        if constexpr (kOf == Of::kUnpermute) {
          if (chosen.row[j] >= 0) store_scaled<T>(x, chosen.weight[j], cut, out, chosen.row[j], from);
        }
      }
      // If dot[] has room for the inner products of all choices, they stay there until the group's last
      // slice, and are stored once. If not, dot[] is needed for the next choices, so its numbers are stored
      // after each slice.
      const bool fit = slots.choices <= kChoices;
      if (!fit || start + cut.step() >= cut.row_vectors)
        keep_dots(of_group + k0, dot, cut, at.lane, slots.choices - k0, fit || start == begin);
    }
    if constexpr (kOf == Of::kPermute) {
      if (alive) store_sums<T>(sum, cut, out, at.token, from);
    }
  }
  write_dots(cut, slots, d_weight);
}

}  // namespace pmoe::permute
