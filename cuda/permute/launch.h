// Launches of the kernels in kernel.cuh. This header is plain C++: no CUDA header, no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_info.h"

namespace pmoe::permute {

enum class RowType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// The rows of a tensor. A row begins on a multiple of 16 bytes, and its length and stride are multiples of 16
// bytes.
struct RowsAt {
  void* data;
  int64_t stride_bytes;
};

// The arguments that the launches have in common. A slot is a (token, choice) pair.
//
// device, stream: where the kernel runs.
// type: element type of the rows.
// tokens, choices, num_rows: T, K, and N, the number of sorted rows.
// row_bytes: bytes of a row, a multiple of 16.
// position: (T, K) row of each slot in the sorted order; outside first_row .. first_row + N - 1 if the slot
//     is dropped.
// weight: (T, K), or null for weights of 1.
// parts: number of groups of threads that split the columns of a token (layout.h); 0 lets the launch choose.
// first_row: index of the first sorted row. The rows before it need not be in memory. Nevertheless, launches
//     take as address of the sorted rows the address that row 0 would have.
struct Moving {
  int device;
  void* stream;
  RowType type;
  int64_t tokens;
  int64_t choices;
  int64_t num_rows;
  int64_t row_bytes;
  const int32_t* position;
  const float* weight;
  int parts;
  int64_t first_row = 0;
};

// All launches return before the work is done. If T, K or a row's bytes are out of range, they throw
// std::invalid_argument before launching anything. If CUDA refuses the launch, they throw std::runtime_error.

// Launches rows[position] = weight * x: copies each token to its sorted rows.
void permute(const Moving& moving, RowsAt x, RowsAt rows);

// A permute of permute_several(): its arguments, the tokens, and the sorted rows.
struct Copying {
  Moving moving;
  RowsAt x, rows;
};

// The most permutes of one permute_several().
constexpr int kMostCopies = 4;

// Launches 1 to kMostCopies permutes at once, without weights, on the device and stream of the first one. All
// must have the same row_bytes and parts.
void permute_several(const std::vector<Copying>& copies);

// Launches y = sum over k of weight * rows[position]: sums the sorted rows of each token.
void unpermute(const Moving& moving, RowsAt rows, RowsAt y);

// Launches the gradient of permute(): d_x = sum over k of weight * d_rows[position], and d_weight = <x,
// d_rows[position]>.
void permute_backward(const Moving& moving, RowsAt x, RowsAt d_rows, RowsAt d_x, float* d_weight);

// Launches the gradient of unpermute(): d_rows[position] = weight * d_y, and d_weight = <d_y,
// rows[position]>.
void unpermute_backward(const Moving& moving, RowsAt d_y, RowsAt rows, RowsAt d_rows, float* d_weight);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::permute
