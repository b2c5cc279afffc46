#include "common/prepared.h"
#include "flashdmoe/ampere.cuh"
#include "flashdmoe/launch.h"

namespace pmoe::flashdmoe {

const int kThreads = ampere::kThreads, kSharedBytes = sizeof(AmpereShared);

PassKernel kernel_of(const Which& which) {
  const bool is_bf16 = which.element == Element::kBf16;
  if (which.is_backward) return is_bf16 ? backward_bf16(which.activation) : backward_fp16(which.activation);
  return is_bf16 ? ampere_bf16(which.activation) : ampere_fp16(which.activation);
}

std::string name_of(const Which& which) {
  const char* const names[] = {"", ".relu", ".gelu", ".silu", ".swiglu"};
  return std::string("flashdmoe.") + (which.is_backward ? "backward" : "forward") + ".sm_80" +
         (which.element == Element::kBf16 ? ".bf16" : ".fp16") + names[static_cast<int>(which.activation)];
}

void launch(const Which& which, const Launch& launch, int blocks, void* stream) {
  const Grid grid = {launch.ranks * blocks, kThreads, kSharedBytes};
  Prepared(name_of(which), kernel_of(which), grid, stream).launch(launch);
}

}  // namespace pmoe::flashdmoe
