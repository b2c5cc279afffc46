// Launches of FlashDMoE's kernels. This code uses no PyTorch, only pointers, sizes and a stream.
#pragma once

#include <string>

#include "flashdmoe/maps.h"
#include "grouped_gemm/launch.h"

namespace pmoe::flashdmoe {

// Selects a compiled kernel: the values that are template arguments of the kernels.
struct Which {
  Element element;
  Activation activation;
  bool is_backward = false;
  bool hopper = false;  // with Hopper's own instructions
};

using PassKernel = void (*)(Launch);
using ForwardKernel = void (*)(HopperLaunch<3>);
using BackwardKernel = void (*)(HopperLaunch<5>);

// Each of these functions returns the kernel for one set of instructions, element type and pass. They are in
// eight files, so that nvcc compiles the kernels in parallel.
ForwardKernel hopper_bf16(Activation);
ForwardKernel hopper_fp16(Activation);
BackwardKernel hopper_backward_bf16(Activation);
BackwardKernel hopper_backward_fp16(Activation);
PassKernel ampere_bf16(Activation);
PassKernel ampere_fp16(Activation);
PassKernel backward_bf16(Activation);
PassKernel backward_fp16(Activation);

// Returns the kernel's address, for cudaFuncGetAttributes.
const void* kernel_of(const Which&);

// Returns the kernel's name, which users and error messages show.
std::string name_of(const Which&);

// The threads and shared memory of a block, and the columns of a tile, for one set of instructions.
struct Path {
  int threads, shared_bytes;  // of a block
  int tile_columns;
};

const Path& path_of(const Which&);

// Launches a pass with `blocks` blocks for each rank. The blocks need not all be resident at once: a rank's
// first block and any one other block can finish all of the rank's tasks. Throws std::runtime_error if CUDA
// refuses the launch.
void launch(const Which&, const Launch&, int blocks, void* stream);

// Returns whether the kernels can send to ranks whose heaps are not mapped (peers/puts.cuh).
bool has_puts();

// Calls visit(which) for every kernel, for example to list them. `which` is a Which: the values of the
// kernel's template arguments.
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
