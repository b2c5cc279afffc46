// Launching FlashDMoE's kernels, without a word of PyTorch: pointers, sizes, a stream.
#pragma once

#include <string>

#include "flashdmoe/maps.h"
#include "grouped_gemm/launch.h"

namespace pmoe::flashdmoe {

struct Which {
  Element element;
  Activation activation;
  bool is_backward = false;
  bool hopper = false;  // by Hopper's own instructions
};

using PassKernel = void (*)(Launch);
using ForwardKernel = void (*)(HopperLaunch<3>);
using BackwardKernel = void (*)(HopperLaunch<5>);

// A translation unit each.
ForwardKernel hopper_bf16(Activation);
ForwardKernel hopper_fp16(Activation);
BackwardKernel hopper_backward_bf16(Activation);
BackwardKernel hopper_backward_fp16(Activation);
PassKernel ampere_bf16(Activation);
PassKernel ampere_fp16(Activation);
PassKernel backward_bf16(Activation);
PassKernel backward_fp16(Activation);

// For cudaFuncGetAttributes.
const void* kernel_of(const Which&);

// As users and errors read it.
std::string name_of(const Which&);

struct Path {
  int threads, shared_bytes;  // of a block
  int tile_columns;
};

const Path& path_of(const Which&);

// One launch, of `blocks` blocks a rank. They need not be resident together: any two of a rank make progress.
// Throws std::runtime_error where CUDA refuses.
void launch(const Which&, const Launch&, int blocks, void* stream);

// All that there are.
template <class Visit>
void for_each(Visit visit) {
  for (bool is_backward : {false, true})
    for (bool hopper : {true, false})
      for (Element element : {Element::kBf16, Element::kFp16})
        for (Activation activation :
             {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu})
          visit(Which{element, activation, is_backward, hopper});
}

}  // namespace pmoe::flashdmoe
