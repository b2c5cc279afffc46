#include "common/prepared.h"
#include "flashdmoe/ampere.cuh"
#include "flashdmoe/launch.h"

namespace pmoe::flashdmoe {

const int kThreads = ampere::kThreads, kSharedBytes = sizeof(AmpereShared);

ForwardKernel kernel_of(const Which& which) {
  return which.element == Element::kBf16 ? ampere_bf16(which.activation) : ampere_fp16(which.activation);
}

std::string name_of(const Which& which) {
  const char* const names[] = {"", ".relu", ".gelu", ".silu", ".swiglu"};
  return std::string("flashdmoe.forward.sm_80") + (which.element == Element::kBf16 ? ".bf16" : ".fp16") +
         names[static_cast<int>(which.activation)];
}

void launch(const Which& which, const Launch& launch, int blocks, void* stream) {
  const Grid grid = {launch.ranks * blocks, kThreads, kSharedBytes};
  Prepared(name_of(which), kernel_of(which), grid, stream).launch(launch);
}

}  // namespace pmoe::flashdmoe
