// The launches of kernel.cuh. Plain C++: no CUDA header, no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_info.h"

namespace pmoe::permute {

enum class RowType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// Rows of 16-byte multiples on 16-byte boundaries; the stride may be any multiple of 16.
struct RowsAt {
  void* data;
  int64_t stride_bytes;
};

// T tokens, K choices, N routed rows. position: (T, K); weight: (T, K) or null. parts: 0 chooses (layout.h).
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
};

// All of them throw std::invalid_argument, before any launch, where T, K or a row's bytes do not fit, and
// std::runtime_error where CUDA refuses. They return before the work is done.

// rows[position] = weight * x
void permute(const Moving& moving, RowsAt x, RowsAt rows);

// y = sum over k of weight * rows[position]
void unpermute(const Moving& moving, RowsAt rows, RowsAt y);

// d_x = sum over k of weight * d_rows[position], d_weight = <x, d_rows[position]>
void permute_backward(const Moving& moving, RowsAt x, RowsAt d_rows, RowsAt d_x, float* d_weight);

// d_rows[position] = weight * d_y, d_weight = <d_y, rows[position]>
void unpermute_backward(const Moving& moving, RowsAt d_y, RowsAt rows, RowsAt d_rows, float* d_weight);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::permute
