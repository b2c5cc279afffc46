// Launches of the kernels in kernel.cuh on the current device. This header is plain C++: no CUDA header, no
// torch. Launches return without waiting, and throw std::runtime_error for an error of CUDA. All addresses
// are of device memory. The numbers `count`, `rows` and `words` are at least 1. Only sum_rows also takes 0
// rows.
#pragma once

#include <cstdint>
#include <vector>

#include "grouped_gemm/launch.h"
#include "kernel_info.h"

namespace pmoe::program {

// out[i] = source[index[i]] for `count` numbers. It also sets `num_cleared` words at `cleared` to 0.
void take_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count,
                  uint32_t* cleared = nullptr, int32_t num_cleared = 0);

// out[index[i]] = source[i] for `count` numbers.
void put_numbers(void* stream, const float* source, const int32_t* index, float* out, int64_t count);

// Rows (rows, 2 * words) of 16-bit numbers, one after another and sorted by expert: expert e has the rows
// ends[e - 1] to ends[e] - 1, with ends[-1] = 0.
struct RowsByExpert {
  const uint32_t* data;
  const int32_t* ends;
  int32_t experts;
  int64_t rows;
  int64_t words;
};

// dots[r] += <grad[r], bias of the row's expert>. The bias is (experts, 2 * words).
void add_bias_dots(void* stream, Element type, const RowsByExpert& grad, const void* bias, float* dots);

// grad[r] *= weight[r], for grad (rows, 2 * words).
void scale_rows(void* stream, Element type, const float* weight, void* grad, int64_t rows, int64_t words);

// total (experts, 2 * words): the sum of each expert's rows, which overwrites `total` or is added to it.
void sum_rows(void* stream, Element type, const RowsByExpert& grad, float* total, bool adds);

// Partial sums of `count` numbers, and the memory for the numbers. `count` is 0 if there is nothing to add
// up.
struct PartialSums {
  const float* parts;  // (number of parts, count)
  float* out;          // (count,)
  int64_t count;
};

// Adds up one or two lists of partial sums, in one launch. `first` has a count of at least 1. If there is no
// second list, the count of `second` is 0.
void sum_parts(void* stream, int num_parts, const PartialSums& first, const PartialSums& second);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::program
