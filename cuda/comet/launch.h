// Launches of COMET's fused kernels. This code uses no PyTorch, only pointers, sizes and a stream.
#pragma once

#include <cstdint>
#include <string>

#include "comet/fused.h"
#include "grouped_gemm/launch.h"

namespace pmoe::comet {

enum class Kernel : int { kDispatch, kCombine };

// Selects a compiled kernel: the values that are template arguments of the kernels.
struct Which {
  Kernel kernel;
  Element element;
  Form form;
  Epilogue epilogue = Epilogue::kPlain;
  Activation activation = Activation::kNone;
};

using FusedKernel = void (*)(Launch);

// Each of these functions returns the kernel for one element type and one set of instructions. They are in
// four files, so that nvcc compiles the kernels in parallel.
FusedKernel hopper_bf16(const Which&);
FusedKernel hopper_fp16(const Which&);
FusedKernel ampere_bf16(const Which&);
FusedKernel ampere_fp16(const Which&);

// One of the two implementations of the kernels: with Hopper's instructions, or with those of sm_80.
struct Path {
  const char* name;
  FusedKernel (*kernel)(const Which&);
  int threads, shared_bytes;
  int tile_rows, tile_columns;
  int board_words;  // largest ArrivalBoard::words() of a launch
};

extern const Path hopper_path, ampere_path;

// Returns the kernel's name, which users and error messages show.
std::string name_of(const Which&, const Path&);

// Returns whether computing blocks may form pairs (clusters of two) that compute two tiles side by side.
//
// Only Hopper's kernels can form clusters. The two blocks of a cluster must both compute or both communicate,
// so the number of a rank's blocks must be even, and so must the number of its communicating blocks. If a row
// of the result has an odd number of tiles, it must have so many that little work is wasted (may_pair_tiles).
bool may_pair_blocks(const Path&, const Which&, const Launch&, int ranks);

// Launches a kernel. Its blocks wait for each other, so this is a cooperative launch: either all blocks of
// all ranks are resident at once, or the launch fails. Throws std::runtime_error if CUDA refuses the launch.
//
// a_rows: (ranks,) number of rows of operand A that may be read.
void launch(const Path&, const Which&, Launch&, int ranks, const int64_t* a_rows, void* stream);

// Calls visit(which) for every kernel, for example to list them. `which` is a Which: the values of the
// kernel's template arguments. The list is the same for both implementations (hopper_path and ampere_path).
template <class Visit>
void for_each(Visit visit) {
  for (Element element : {Element::kBf16, Element::kFp16}) {
    for (Form form : {Form::kForward, Form::kInput}) visit(Which{Kernel::kCombine, element, form});
    for (Activation activation :
         {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
      visit(Which{Kernel::kDispatch, element, Form::kForward, Epilogue::kHidden, activation});
      visit(Which{Kernel::kDispatch, element, Form::kInput, Epilogue::kHiddenGradient, activation});
    }
  }
}

}  // namespace pmoe::comet
