// Launches of the kernels in kernel.cuh. This header is plain C++: no CUDA header, no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_info.h"
#include "wire/layout.h"

namespace pmoe::wire {

enum class RowType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// The rows of a tensor; messages are rows of bytes. Addresses and strides of rows are multiples of 16 bytes,
// those of messages multiples of 4 bytes, or of 8 with Format::kBf16.
struct RowsAt {
  void* data;
  int64_t stride_bytes;
};

// Where a kernel runs, and what it converts.
//
// columns: M, how many numbers a row has.
struct Wire {
  int device;
  void* stream;
  RowType type;
  Format format;
  int64_t columns;
};

// Both launches return before the work is done. If sizes are out of range, or if the format is no narrower
// than the type, they throw std::invalid_argument before launching anything. If CUDA refuses the launch, they
// throw std::runtime_error.

// Launches the kernel that writes messages. The message of a (token, choice) pair is the token's row in the
// wire's format.
//
// position: (T, K), the index of the message of each of K choices of T tokens. A choice whose position is not
//     from 0 to num_messages - 1 has no message. If position is null, K must be 1, and token t has message t.
void pack(const Wire& wire, int64_t tokens, int64_t choices, int64_t num_messages, const int32_t* position,
          RowsAt x, RowsAt messages);

// Launches the kernel that reads messages: row i of `out` becomes the row in message index[i], or zeros if
// index[i] is not from 0 to num_messages - 1.
//
// index: the index of the message of each row, int64 if `wide` is true, else int32. If it is null, row i has
//     message i.
void unpack(const Wire& wire, int64_t rows, int64_t num_messages, const void* index, bool wide,
            RowsAt messages, RowsAt out);

void list_kernels(std::vector<KernelInfo>& found);

}  // namespace pmoe::wire
