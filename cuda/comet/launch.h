// Launching the fused kernels, without a word of PyTorch: pointers, sizes, a stream.
#pragma once

#include <cstdint>
#include <string>

#include "comet/fused.h"
#include "grouped_gemm/launch.h"

namespace pmoe::comet {

enum class Kernel : int { kDispatch, kCombine };

struct Which {
  Kernel kernel;
  Element element;
  Form form;
  Epilogue epilogue = Epilogue::kPlain;
  Activation activation = Activation::kNone;
};

using FusedKernel = void (*)(Launch);

// A translation unit an element type and path defines one.
FusedKernel hopper_bf16(const Which&);
FusedKernel hopper_fp16(const Which&);
FusedKernel ampere_bf16(const Which&);
FusedKernel ampere_fp16(const Which&);

struct Path {
  const char* name;
  FusedKernel (*kernel)(const Which&);
  int threads, shared_bytes;
  int tile_rows, tile_columns;
  int board_words;  // at least Board::words of what is launched
};

extern const Path hopper_path, ampere_path;

// As users and errors read it.
std::string name_of(const Which&, const Path&);

// Whether computing blocks may form pairs whose tiles lie side by side: of a cluster both compute, or
// neither, and both have columns.
bool goes_in_pairs(const Path&, const Which&, const Launch&, int ranks);

// a_rows: rows of A that may be read, of each rank. All blocks of all ranks are resident, or there is no
// launch. Throws std::runtime_error where CUDA refuses.
void launch(const Path&, const Which&, Launch&, int ranks, const int64_t* a_rows, void* stream);

// All that there are of a path.
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
