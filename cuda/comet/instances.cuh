// Selects the compiled instance of a kernel template by the dtype, product and activation of a launch.
#pragma once
#include "comet/launch.h"
#include "grouped_gemm/instances.cuh"

namespace pmoe::comet {

// Turns the values in `which` into template arguments: calls use.operator()<form, epilogue, activation>() for
// a dispatching kernel, and use.combine<form>() for a combining kernel.
template <class Use>
FusedKernel with_constants(const Which& which, const Use& use) {
  if (which.kernel == Kernel::kCombine)
    return which.form == Form::kForward ? use.template combine<Form::kForward>()
                                        : use.template combine<Form::kInput>();
  if (which.epilogue == Epilogue::kHiddenGradient)
    return with_activation<Form::kInput, Epilogue::kHiddenGradient>(which.activation, use);
  return with_activation<Form::kForward, Epilogue::kHidden>(which.activation, use);
}

}  // namespace pmoe::comet
