// Moving rows to where their experts read them, and back. Knows no torch; see layout.h for who moves what.
//
// Every kernel goes by tokens, not by routed rows: a token's own row is read once, and its K routed rows are
// read or written once each, wherever they stand. Positions outside 0 .. num_rows - 1 are dropped slots,
// whose rows are neither read nor written. Sums are float32, in a fixed order, and rounded once.
//
// Letters: T tokens, K choices, N routed rows; a is what a token has one row of, b what it has K rows of.
#pragma once
#include <cmath>
#include <cstring>

#include "common/device.cuh"
#include "common/scalar.h"
#include "permute/layout.h"

namespace pmoe::permute {

struct Rows {
  uint8_t* base;
  int64_t stride_bytes;

  PMOE_HD uint8_t* at(int64_t row, int32_t vector) const {
    return base + row * stride_bytes + int64_t{vector} * 16;
  }
};

struct Slots {
  const int32_t* position;  // (T, K)
  const float* weight;      // (T, K); null where a kernel is not weighted
  int32_t choices;
  uint32_t num_rows;  // 2**31 at most: positions name no more

  PMOE_HD bool kept(int32_t position) const { return static_cast<uint32_t>(position) < num_rows; }
};

// ---- 16 bytes as numbers

template <class T>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

PMOE_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

PMOE_HD uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

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
      v.word[i] = bits_of_float(x[i]);
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

// sum[i] += weight * v[i]
template <class T>
PMOE_HD void add_scaled(float (&sum)[kPerVector<T>], const Words& v, float weight) {
  float x[kPerVector<T>];
  unpack<T>(v, x);
  PMOE_UNROLL
  for (int i = 0; i < kPerVector<T>; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
}

// sum + <v, w>, element by element
template <class T>
PMOE_HD float add_dot(float sum, const Words& v, const Words& w) {
  float x[kPerVector<T>], y[kPerVector<T>];
  unpack<T>(v, x);
  unpack<T>(w, y);
  PMOE_UNROLL
  for (int i = 0; i < kPerVector<T>; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}

// ---- steps that all kernels share

// Some choices of one token: where their rows stand, -1 for a dropped slot, which weighs 0.
template <int kChoices>
struct Chosen {
  int32_t row[kChoices];
  float weight[kChoices];
};

// The choices k0, k0 + 1, ...; those past the last one, or of no token (alive is false), are dropped.
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

// A lane's vectors of a slice; zeros past the row's end, and of no row where `row` is negative.
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

// Writes them back; nothing past the row's end.
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

// Blocks of a multiprocessor, where __launch_bounds__ names them, are so few that the compiler spends
// registers on loads: all positions are on their way at once, then all vectors of all rows, and only then is
// anything used.
constexpr int kThreads = 256;
constexpr int kPermuteVectors = 4;
constexpr int kPermuteChoices = 4;  // positions that are loaded together

template <class T, bool kWeighted>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const Cut cut, const Slots slots, const Rows a, const Rows b) {
  const Cut::Place at = cut.place(blockIdx.x, threadIdx.x);
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

// ---- both gradients at once: of rows, and the weights' <a[token], b[position]>

enum class Of { kPermute, kUnpermute };

constexpr int kMostChoices = 256;  // the inner products of a block's 32 groups then take 32 KiB

inline int dots_bytes(const Cut& cut, int choices) {
  return cut.groups() * choices * static_cast<int>(sizeof(float));
}

// The inner products of the calling thread's group, (K,) floats of (groups of the block, K).
__device__ __forceinline__ float* dots_of_group(const Cut& cut, const Slots& slots) {
  return reinterpret_cast<float*>(shared_memory()) + cut.group(threadIdx.x) * slots.choices;
}

// Sums over the lanes of each group, all lanes of a warp calling. Lane 0 then writes the first `left` sums,
// or adds them to what its group has. Leaves zeros.
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

// Adds the parts of each token in their order. A dropped slot's gradient is 0, whatever a[token] holds.
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

// d_weight = <a[token], b[position]>. Of permute, a is x and b the gradient of its rows:
// out[token] = sum over k of weight * b[position]. Of unpermute, a is the gradient of y and b its rows:
// out[position] = weight * a[token].
template <class T, int kVectors, int kChoices, Of kOf>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const Cut cut, const Slots slots, const Rows a, const Rows b, const Rows out,
                    float* d_weight) {
  const Cut::Place at = cut.place(blockIdx.x, threadIdx.x);
  const bool alive = at.token < cut.tokens;  // the others come along to where threads meet
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
      // Where all choices fit into registers they stay there until the part's last slice.
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
