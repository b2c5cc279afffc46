// Launching the grouped products, without a word of PyTorch: pointers, sizes, a stream.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "problem.h"

namespace pmoe {

enum class Element : int { kBf16, kFp16 };

struct GroupedGemm {
  Element element;
  Form form;
  Epilogue epilogue;
  Activation activation;  // kNone where the epilogue is plain
};

// The two ways to compute one. function(): for cudaFuncGetAttributes.
struct GroupedGemmPath {
  const void* (*function)(const GroupedGemm&);
  // a_rows, b_rows: of what A and B (where it has N rows) point to.
  cudaError_t (*launch)(const GroupedGemm&, const Problem&, int64_t a_rows, int64_t b_rows, int blocks,
                        cudaStream_t);
  int threads, shared_bytes;
};

extern const GroupedGemmPath hopper_path, ampere_path;

// All that exist of an element type.
template <class Visit>
void for_each_grouped_gemm(Visit visit) {
  for (Element element : {Element::kBf16, Element::kFp16}) {
    for (Form form : {Form::kForward, Form::kInput, Form::kWeight})
      visit(GroupedGemm{element, form, Epilogue::kPlain, Activation::kNone});
    for (Activation activation : {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
      visit(GroupedGemm{element, Form::kForward, Epilogue::kHidden, activation});
      visit(GroupedGemm{element, Form::kInput, Epilogue::kHiddenGradient, activation});
    }
  }
}

}  // namespace pmoe
