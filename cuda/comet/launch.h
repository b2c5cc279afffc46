// Launches of the fused kernels. It knows no PyTorch, only pointers, sizes and a stream.
#pragma once

#include <cstdint>
#include <string>

#include "comet/fused.h"
#include "grouped_gemm/launch.h"

namespace pmoe::comet {

enum class Kernel : int { kDispatch, kCombine };

// Selects a kernel: the values that are constants when it is compiled.
struct Which {
  Kernel kernel;
  Element element;
  Form form;
  Epilogue epilogue = Epilogue::kPlain;
  Activation activation = Activation::kNone;
};

using FusedKernel = void (*)(Launch);

// The kernels of each element type and path. Each is a translation unit of its own.
FusedKernel hopper_bf16(const Which&);
FusedKernel hopper_fp16(const Which&);
FusedKernel ampere_bf16(const Which&);
FusedKernel ampere_fp16(const Which&);

// One of the two ways to compute: with Hopper's instructions, or with those of sm_80.
struct Path {
  const char* name;
  FusedKernel (*kernel)(const Which&);
  int threads, shared_bytes;
  int tile_rows, tile_columns;
  int board_words;  // largest ArrivalBoard::words() of a launch
};

extern const Path hopper_path, ampere_path;

// Returns the kernel's name, as users and errors show it.
std::string name_of(const Which&, const Path&);

// Returns whether computing blocks may form pairs whose tiles lie side by side. Both blocks of a cluster must
// compute, or neither, and the columns must suffice for both.
bool may_pair_blocks(const Path&, const Which&, const Launch&, int ranks);

// Launches a kernel. All blocks of all ranks are resident, or the launch fails. Throws std::runtime_error if
// CUDA refuses it.
//
// a_rows: (ranks,) rows of A that may be read.
void launch(const Path&, const Which&, Launch&, int ranks, const int64_t* a_rows, void* stream);

// Visits every kernel of a path.
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
